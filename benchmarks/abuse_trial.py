"""The small model, its batches and the record of an outcome that all parts of `benchmarks.abuse` use."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "abuse.json"
Batch = dict[str, torch.Tensor]
BAD = "BAD: "


def make_model(layers: int = 2) -> nn.Module:
    """GPT-2 with layers of width 64."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=layers, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


def make_batch(samples: int, length: int, seed: int = 1) -> Batch:
    """Random tokens as inputs and labels."""
    tokens = torch.randint(0, 512, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


class Row:
    """The counts of one part, written to the result file as they come."""

    def __init__(self, part: str) -> None:
        self.part = part
        document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        self.values = document.get(part, {"seeds": 0, "seconds": 0.0, "outcomes": {}, "bad": [], "figures": {}})
        self.started = time.perf_counter() - self.values["seconds"]

    def note(self, seed: int, outcome: str, text: str = "") -> None:
        """Count the outcome of a seed; one that starts with `BAD` is listed."""
        outcomes = self.values["outcomes"]
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome.startswith(BAD):
            self.values["bad"].append({"seed": seed, "outcome": outcome, "text": text[:300]})
            print(self.part, seed, outcome, text[:300], flush=True)

    def save(self, seeds: int) -> None:
        """Write the row; the seeds below `seeds` have run."""
        self.values.update(seeds=seeds, seconds=time.perf_counter() - self.started)
        document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        write_result(RESULT, {**document, **stamp(), self.part: self.values})
        print(self.part, seeds, self.values["outcomes"], flush=True)


def equal(first: Any, second: Any) -> bool:
    """Whether two lists of tensors or numbers are bitwise equal."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)

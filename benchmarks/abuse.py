"""Kept plans, plan files, caches and checkpoints under abuse: nothing may be corrupt, lost or growing.

    python -m benchmarks.abuse [mutations kills shapes] [--until 2000] [--limit-minutes 30]

Goes on where it stopped: each part runs the seeds from the number in its row of the result file up to `--until`.

- mutations: a kept plan (and a plan in a file of its own) with other bytes, cut off, with other values in its fields,
  of another budget, with a right digest or a wrong one; then one planned step beside the plain one.
- kills: a training run with checkpoints that is killed at a random moment, or at a random byte of a file that it
  writes, or that finds the disk full; then a process that goes on from its files, whose parameters are compared with
  those of a run that nothing disturbed.
- shapes: steps with changing batches and lengths, planned beside plain.

The model is transformers' GPT-2 with 2 layers of width 64 (one for the kills) and dropout, in fp32, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "abuse.json"
Batch = dict[str, torch.Tensor]
Report = Callable[[int, str, str], None]
"""Takes a seed, its outcome, and a text for an outcome that must not be."""
BAD = "BAD: "
UNTIL = {"mutations": 2000, "kills": 200, "shapes": 2000}


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
        """Write the row, which has come to `seeds`."""
        self.values.update(seeds=seeds, seconds=time.perf_counter() - self.started)
        document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        write_result(RESULT, {**document, **stamp(), self.part: self.values})
        print(self.part, seeds, self.values["outcomes"], flush=True)


def run(part: str, until: int, limit_seconds: float) -> None:
    """Run a part from the seed that it has come to."""
    from benchmarks import abuse_files, abuse_kills, abuse_shapes

    parts: dict[str, Callable[[Row], Callable[[int], None]]] = {
        "mutations": abuse_files.prepare, "kills": abuse_kills.prepare, "shapes": abuse_shapes.prepare
    }  # fmt: skip
    row, begin = Row(part), time.perf_counter()
    done = row.values["seeds"]
    one = parts[part](row)
    while done < until and time.perf_counter() - begin < limit_seconds:
        one(done)
        done += 1
        if done % 50 == 0:
            row.save(done)
    row.save(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*UNTIL, []], default=[])
    parser.add_argument("--until", type=int)
    parser.add_argument("--limit-minutes", type=float, default=600.0)
    given = parser.parse_args()
    os.environ["MEMOPT_CACHE"] = "1"
    torch.set_num_threads(1)
    for part in given.parts or UNTIL:
        run(part, given.until or UNTIL[part], 60 * given.limit_minutes)


def equal(first: Any, second: Any) -> bool:
    """Whether two lists of tensors or numbers are bitwise equal."""
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


if __name__ == "__main__":
    main()

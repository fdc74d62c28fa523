"""The longest sequences, and the largest images, that one card trains, without and with the lever "tiles".

    python -m benchmarks.longest [--only "Llama 3.2 1B, LoRA"] [--cards 24]

Planned on the meta device, nothing is run: one sequence or image a step, bf16 compute, fused AdamW, all other levers as
they are by default, offloading to the host among them. In full: fp32 parameters, gradients and state; LoRA: adapters of
rank 16 on all linear layers of the blocks, a frozen base in bf16. On 24 GB (an RTX 4090) and 80 GB (an H100)
`memopt.max_length` finds the longest; at the longest without tiles, the smallest budget and the predicted time of a
step of both are compared. Each model has a process of its own; results are kept model by model.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import memopt
from benchmarks.gpu_models import library, unet
from benchmarks.guide import MODELS as LLAMAS
from benchmarks.processes import record_of
from benchmarks.real_models import integers
from benchmarks.stamp import stamp, write_result
from memopt.errors import BudgetError
from memopt.planning.advice import with_low_rank

RESULT = Path(__file__).parent / "results" / "longest.json"
CARDS = {24: "rtx-4090", 80: "h100"}
Batch = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A model whose batches have a length: tokens of the sequence, or pixels of an image's side."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    multiple_of: int
    at_most: int | None = None


def text(length: int) -> Batch:
    tokens = integers(1, length)
    return {"input_ids": tokens, "labels": tokens}


def picture(side: int) -> Batch:
    pixels = torch.empty(1, 3, side, side, device="meta")
    return {"pixel_values": pixels, "labels": integers(1), "interpolate_pos_encoding": True}


def segmentation(side: int) -> Batch:
    return {"images": torch.empty(1, 3, side, side, device="meta"), "targets": integers(1, side, side)}


def with_adapters(make: Callable[[], nn.Module]) -> nn.Module:
    return with_low_rank(make().to(torch.bfloat16))[0]


def trials() -> dict[str, Trial]:
    """The models by name, at their real sizes."""
    experts = transformers.Qwen3MoeConfig(num_hidden_layers=12, use_cache=False, experts_implementation="grouped_mm")
    mixture = library("Qwen3MoeForCausalLM", experts, "ForCausalLM")
    words = transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16, n_positions=2**19, use_cache=False)
    image = transformers.ViTConfig(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=1000,
        problem_type="single_label_classification",
    )  # fmt: skip
    found = {}
    for size in ("Llama-3.2-1B", "Llama-3.1-8B"):
        make = LLAMAS[size][1]
        found[size] = Trial(make, text, 2048)
        found[f"{size}, LoRA"] = Trial(functools.partial(with_adapters, make), text, 2048)
    found["Qwen3-MoE, 12 layers, LoRA"] = Trial(functools.partial(with_adapters, mixture), text, 2048)
    found["GPT-2 medium"] = Trial(library("GPT2LMHeadModel", words, "ForCausalLM"), text, 2048, 2**19)
    found["ViT-L/16"] = Trial(library("ViTForImageClassification", image, "ForSequenceClassification"), picture, 128)
    found["U-Net"] = Trial(unet(), segmentation, 128)
    return found


def measure(name: str, card: int) -> dict[str, Any]:
    """The row of one model on one card; to be called in a fresh process."""
    torch.set_num_threads(1)
    trial, began = trials()[name], time.process_time()

    def options(*levers: str) -> dict[str, Any]:
        allow = memopt.DEFAULT_LEVERS | set(levers)
        optimizer = functools.partial(torch.optim.AdamW, fused=True)
        return {"device": CARDS[card], "precision": "bf16", "allow": allow, "optimizer": optimizer}

    def model() -> nn.Module:
        with torch.device("meta"):
            made = trial.make()
        made.loss_type = getattr(made, "loss_type", None) or "ForCausalLM"  # type: ignore[assignment]
        return made.train()

    def longest(*levers: str) -> int:
        limits: dict[str, Any] = {"multiple_of": trial.multiple_of, "at_most": trial.at_most}
        try:
            return memopt.max_length(model(), card, trial.batch, **limits, **options(*levers))
        except BudgetError:
            return 0

    def planned(length: int, *levers: str) -> memopt.Plan:
        return memopt.plan(model(), card, trial.batch(length), **options(*levers))

    def seconds(plan: memopt.Plan) -> float:
        return plan.step_seconds * (1 + plan.added_time)

    row: dict[str, Any] = {"model": name, "card_gb": card, "longest": longest(), "tiled": longest("tiles")}
    if length := row["longest"]:
        usual, tiled = planned(length), planned(length, "tiles")
        row |= {
            "smallest_gb": usual.smallest_gb(),
            "tiled_smallest_gb": tiled.smallest_gb(),
            "seconds": seconds(usual),
            "tiled_seconds": seconds(tiled),
        }
    return {**row, "cpu_s": time.process_time() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=trials(), default=list(trials()))
    parser.add_argument("--cards", nargs="+", type=int, choices=CARDS, default=list(CARDS))
    parser.add_argument("--row", action="store_true", help="one model on one card, in this process; prints the row")
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(measure(*chosen.only, *chosen.cards)))
        return
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    for name in chosen.only:
        for card in chosen.cards:
            row = record_of("longest", "--row", "--only", name, "--cards", str(card))
            rows = [known for known in rows if (known["model"], known["card_gb"]) != (name, card)] + [row]
            print(row, file=sys.stderr, flush=True)
            write_result(RESULT, {**stamp(), "rows": rows})


if __name__ == "__main__":
    main()

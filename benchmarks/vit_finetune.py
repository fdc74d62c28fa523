"""Fine-tuning ViT-L/16 as the article did, measured: its ladder step by step, and memopt at each step's peak.

    python -m benchmarks.vit_finetune             # on a GPU
    python -m benchmarks.vit_finetune --small     # the same code on a small ViT, on the CPU where there is no GPU

Random weights, scikit-learn's handwritten digits enlarged to the model's images, Adam, batches of 64. The article's
steps (Raschka 2023, rasbt/pytorch-memory-optim): fp32; mixed precision; all in bf16; a batch of 16; microbatches of 4
in it; SGD. memopt keeps the batch of 64 and Adam: with its default levers at the measured peak of each step; where they
do not suffice, with levers on the optimizer too, and where these do not either, in the smallest budget that works.
Peaks are what torch handed out and, on a GPU, reserved; times are medians of steps after warming up, in one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import memopt
from benchmarks.gpu import DEVICE, UNSEEN, forget, wait
from benchmarks.gpu_models import LARGE, Batch, library
from benchmarks.stamp import stamp, write_result
from memopt.errors import GIB, BudgetError
from memopt.levers import DEFAULT_LEVERS
from memopt.microbatch import split

RESULTS = Path(__file__).parent / "results"
BATCH = 64
PROPOSALS = DEFAULT_LEVERS | {"bf16_parameters", "low_bit_optimizer"}
SIZES = {False: {**LARGE, "image_size": 224, "patch_size": 16}, True: {
    "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "image_size": 64,
    "patch_size": 8,
}}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """One step of the article: what it changes in the training."""

    name: str
    low: bool = False
    """Whether parameters, gradients and state are in bf16."""
    autocast: bool = False
    batch: int = BATCH
    pieces: int = 1
    sgd: bool = False


LADDER = (
    Recipe("fp32"),
    Recipe("mixed precision", autocast=True),
    Recipe("bf16", low=True),
    Recipe("batch 16", low=True, batch=16),
    Recipe("microbatches of 4", low=True, batch=16, pieces=4),
    Recipe("SGD", low=True, batch=16, pieces=4, sgd=True),
)


@dataclass(frozen=True)
class Row:
    recipe: str
    method: str
    """ "by hand", or memopt with its levers."""
    batch: int
    peak_gb: float
    reserved_gb: float | None
    step_ms: float
    images_per_second: float
    loss: float
    predicted_gb: float | None = None
    budget_gb: float | None = None


def make(*, small: bool) -> nn.Module:
    config = transformers.ViTConfig(**SIZES[small], num_labels=10, problem_type="single_label_classification")
    with torch.device(DEVICE):
        return library("ViTForImageClassification", config, "ForSequenceClassification")()


def batch(size: int, *, small: bool) -> Batch:
    data, side = load_digits(), SIZES[small]["image_size"]
    images = torch.tensor(data.images[:size], dtype=torch.float32)[:, None] / 8 - 1
    large = functional.interpolate(images, size=(side, side), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    return {"pixel_values": large.to(DEVICE), "labels": torch.tensor(data.target[:size]).to(DEVICE)}


def measured(recipe: str, method: str, size: int, step: Callable[[], Any], steps: int, **further: Any) -> Row:
    for _ in range(2):
        step()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with memopt.measure_peak(DEVICE) as peak:
        step()
    seconds = []
    for _ in range(steps):
        wait()
        begin = time.perf_counter()
        loss = float(step())
        wait()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    reserved = torch.cuda.max_memory_reserved() / GIB if DEVICE == "cuda" else None
    row = Row(recipe, method, size, peak.bytes / GIB, reserved, median * 1e3, size / median, loss, **further)
    print(row, file=sys.stderr, flush=True)
    return row


def by_hand(recipe: Recipe, *, small: bool, steps: int) -> Row:
    model, whole = make(small=small), batch(recipe.batch, small=small)
    if recipe.low:
        model, whole = model.bfloat16(), {**whole, "pixel_values": whole["pixel_values"].bfloat16()}
    kind: Any = torch.optim.SGD if recipe.sgd else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=5e-5)

    def step() -> float:
        total = 0.0
        for piece in split(whole, recipe.pieces):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=recipe.autocast):
                loss = model(**piece).loss / recipe.pieces
            if piece is whole:
                optimizer.zero_grad()  # after the forward, as there
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return measured(recipe.name, "by hand", recipe.batch, step, steps)


def by_memopt(recipe: str, peak_gb: float, *, small: bool, steps: int) -> Row:
    """Train by memopt within a budget, or within the smallest that works if that is larger."""
    model, whole = make(small=small), batch(BATCH, small=small)
    budget_gb = peak_gb + UNSEEN / GIB
    for allow, least in ((DEFAULT_LEVERS, False), (PROPOSALS, False), (PROPOSALS, True)):
        try:
            example = split(whole, BATCH)[0] if allow is PROPOSALS else whole
            options: dict[str, Any] = {"optimizer": torch.optim.Adam, "precision": "bf16", "allow": allow}
            memopt.optimize(model, budget_gb, example_inputs=example, **options)
            break
        except BudgetError as error:
            assert not least, "the smallest budget that a refusal names works"
            if allow is PROPOSALS:
                budget_gb = 1.01 * error.smallest_gb  # TrainStep adds to gradients from the second piece on
    optimizer = memopt.wrap_optimizer(model, torch.optim.Adam(model.parameters(), lr=5e-5))
    step = memopt.TrainStep(model, optimizer)
    row = measured(recipe, "memopt", BATCH, lambda: step(whole).loss, steps)
    plan = memopt.plan_of(model)
    pulled = " + ".join(("memopt", *plan.levers, *plan.proposals))
    predicted_gb = plan.predicted_peak_gb - plan.account.uncounted_bytes / GIB
    return Row(**{**asdict(row), "method": pulled, "predicted_gb": predicted_gb, "budget_gb": budget_gb})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small ViT")
    small = parser.parse_args().small
    assert small or DEVICE == "cuda", "no GPU here: --small runs the same code on a small ViT"
    rows: list[Row] = []
    for recipe in LADDER:
        rows.append(by_hand(recipe, small=small, steps=3 if small else 10))
        forget()
        rows.append(by_memopt(recipe.name, rows[-1].peak_gb, small=small, steps=3 if small else 10))
        forget()
    path = RESULTS / f"vit_finetune{'_small' * small}.json"
    write_result(path, {**stamp(), "device": DEVICE, "rows": [*map(asdict, rows)]})
    table = Table(title=f"ViT fine-tuning on {DEVICE}: the article's steps, and memopt at each one's peak")
    for column in ("step", "by", "batch", "peak GB", "reserved", "ms", "images/s", "loss"):
        table.add_column(column, justify="left" if column in ("step", "by") else "right", overflow="fold")
    for row in rows:
        reserved = "–" if row.reserved_gb is None else f"{row.reserved_gb:.2f}"
        figures = f"{row.peak_gb:.4g}", reserved, f"{row.step_ms:.0f}", f"{row.images_per_second:.1f}"
        table.add_row(row.recipe, row.method, str(row.batch), *figures, f"{row.loss:.3f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

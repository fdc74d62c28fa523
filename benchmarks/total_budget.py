"""Whole training steps of real size within a share of the plain step's memory, measured: a JSON file and a table.

    python -m benchmarks.total_budget [--only GPT-2]

GPT-2 small (124 million parameters, 4 sequences of 512) and ViT-B/16 (32 images), AdamW, on the CPU. The plain total is
the measured peak of two whole fp32 steps: parameters, gradients, state, activations, the optimizer's own. For half of
it, 0.35 and 0.25 two steps are trained by `memopt.optimize(model, budget)` and `TrainStep`, or, where that is refused,
with the cheapest levers that it names. The refusal's own smallest budget is trained within as well, and the smallest
with the optimizer in the backward, by a loop of its own (TrainStep steps after it).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import memopt
from benchmarks.stamp import stamp, write_result
from memopt.account.account import distinct_bytes
from memopt.errors import GIB, BudgetError
from memopt.levers import DEFAULT_LEVERS
from memopt.levers.optimizer_levers import OPTIMIZER_IN_BACKWARD
from memopt.meter import measure_peak
from memopt.microbatch import samples_of, split

RESULT = Path(__file__).parent / "results" / "total_budget.json"
SHARES = (0.5, 0.35, 0.25)
STEPS = 2
Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], Any]
Trainer = Callable[[nn.Module, torch.optim.Optimizer], Step]


@dataclass(frozen=True)
class Row:
    model: str
    share: float
    """The budget as a share of the plain total."""
    budget_gb: float
    outcome: str
    """"met", "refused" or "met with proposals"."""
    smallest_gb: float | None
    """The smallest budget that the refusal names; None where nothing was refused."""
    levers: tuple[str, ...]
    measured_gb: float | None
    predicted_gb: float | None
    added_time: float | None
    microbatches: bool
    """Whether `TrainStep` split the batch."""


def gpt2() -> tuple[nn.Module, Batch]:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(0, 50257, (4, 512))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def vit() -> tuple[nn.Module, Batch]:
    config = transformers.ViTConfig(num_labels=1000, problem_type="single_label_classification")
    model = transformers.ViTForImageClassification(config)
    model.loss_type = "ForSequenceClassification"
    return model.train(), {"pixel_values": torch.randn(32, 3, 224, 224), "labels": torch.randint(0, 1000, (32,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {"GPT-2": gpt2, "ViT-B/16": vit}


def by_train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return memopt.TrainStep(model, optimizer)


def by_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def total_gb(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, trainer: Trainer) -> float:
    """The measured peak of a few training steps, everything included."""
    step = trainer(model, optimizer)
    held = distinct_bytes([*model.parameters(), *model.buffers(), *batch.values()])
    gc.collect()
    with measure_peak("cpu") as peak:
        for _ in range(STEPS):
            step(batch)
    return (peak.allocated_bytes + held) / GIB


def plain_total_gb(name: str) -> float:
    model, batch = MODELS[name]()
    return total_gb(model, batch, torch.optim.AdamW(model.parameters()), by_train_step)


def train(
    name: str,
    share: float,
    budget_gb: float,
    allow: frozenset[str],
    refused: BudgetError | None,
    trainer: Trainer = by_train_step,
) -> Row:
    model, batch = MODELS[name]()
    # What is to be pulled about the optimiser is decided on one sample, since TrainStep splits the batch as it must.
    whole = batch if trainer is by_loop else split(batch, samples_of(batch))[0]
    sample = whole if allow != DEFAULT_LEVERS else None
    memopt.optimize(model, budget_gb, example_inputs=sample, allow=allow)
    proposals = memopt.plan_of(model).proposals if sample else ()
    optimizer = memopt.wrap_optimizer(model, torch.optim.AdamW(model.parameters()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        measured_gb = total_gb(model, batch, optimizer, trainer)
    last = memopt.plan_of(model)
    return Row(
        name, share, budget_gb, "met with proposals" if proposals else "met", refused.smallest_gb if refused else None,
        (*last.levers, *proposals), measured_gb, last.predicted_peak_gb,
        (last.step_seconds + last.added_seconds) / last.receipt[0].seconds - 1,
        any("microbatches" in str(warning.message) for warning in said),
    )  # fmt: skip


def rows_of(name: str, share: float, plain_gb: float) -> list[Row]:
    budget_gb = share * plain_gb
    try:
        return [train(name, share, budget_gb, DEFAULT_LEVERS, None)]
    except BudgetError as error:
        refused = error.with_traceback(None)  # which holds the model that was refused
    rows = [
        Row(name, share, budget_gb, "refused", refused.smallest_gb, (), None, None, None, False),
        train(name, refused.smallest_gb / plain_gb, refused.smallest_gb, DEFAULT_LEVERS, refused),
    ]
    if refused.proposals:
        rows.append(train(name, share, budget_gb, DEFAULT_LEVERS | set(refused.proposals[0]), refused))
    if nbytes := refused.smallest_with.get((OPTIMIZER_IN_BACKWARD.name,)):
        allow, least_gb = DEFAULT_LEVERS | {OPTIMIZER_IN_BACKWARD.name}, 1.001 * nbytes / GIB
        rows.append(train(name, least_gb / plain_gb, least_gb, allow, refused, by_loop))
    return rows


def table(rows: list[Row]) -> Table:
    table = Table(title="Whole steps on the CPU, AdamW; GB of 1024³", title_justify="left")
    for column in ("model", "share", "budget", "outcome", "smallest", "levers", "measured", "predicted", "added"):
        table.add_column(column, justify="left" if column in ("model", "outcome", "levers") else "right")
    for row in rows:
        figures = (row.smallest_gb, row.measured_gb, row.predicted_gb)
        smallest, measured, predicted = ("" if figure is None else f"{figure:.3f}" for figure in figures)
        added = "" if row.added_time is None else f"{row.added_time:+.1%}"
        levers = ", ".join((*row.levers, *(["microbatch"] if row.microbatches else [])))
        table.add_row(
            row.model, f"{row.share:.3f}", f"{row.budget_gb:.3f}", row.outcome, smallest, levers, measured, predicted,
            added,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    rows: list[Row] = []
    for name in parser.parse_args().only:
        plain_gb = plain_total_gb(name)
        print(f"{name}: the plain step holds {plain_gb:.3f} GB", file=sys.stderr, flush=True)
        for share in SHARES:
            rows += rows_of(name, share, plain_gb)
            print(rows[-1], file=sys.stderr, flush=True)
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    known = [row for row in known if row["model"] not in {row.model for row in rows}]
    write_result(RESULT, {**stamp(), "rows": known + [asdict(row) for row in rows]})
    Console(width=150).print(table(rows))


if __name__ == "__main__":
    main()

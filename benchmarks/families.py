"""Every family of `examples/models` under seven budgets, measured, beside checkpointing per block: JSON and tables.

    python -m benchmarks.families [--only gpt2-sdpa]

A budget's share is where it lies between the smallest that works (0) and the plain model's measured peak (1). Peaks are
of one forward and backward: parameters, buffers, inputs, and all that is allocated beside them.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.families import BY_NAME, Family
from examples.models.step import Step, restored_buffers, train_step
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "families.json"
SHARES = (1.0, 0.75, 0.5, 0.25, 0.03, 0.01, 0.0)


@dataclass(frozen=True)
class Run:
    family: str
    share: float
    budget_mb: float
    measured_mb: float
    predicted_mb: float
    largest_difference: float
    """The largest difference of the loss, a gradient or a buffer, over the largest plain value; 0: bitwise equal."""
    added_time: float
    bound: float
    most_evaluations: int
    """The most evaluations of one op."""


@dataclass(frozen=True)
class Checkpointing:
    family: str
    checkpointed_mb: float
    smallest_mb: float
    added_time_per_block: float
    added_time_here: float
    """memopt's added time at the budget that checkpointing per block needs."""


def difference(step: Step, plain: Step) -> float:
    pairs = [(step.loss, plain.loss)]
    pairs += [(step.gradients[name], plain.gradients[name]) for name in plain.gradients]
    pairs += [(step.buffers[name], plain.buffers[name]) for name in plain.buffers]
    apart = [(ours, theirs) for ours, theirs in pairs if not torch.equal(ours, theirs)]
    return max((float((o - t).abs().max() / t.abs().max().clamp_min(1e-30)) for o, t in apart), default=0.0)


EXACT: dict[str, Any] = {
    "optimizer": None,
    "precision": "fp32",
    "allow": {"recompute"},
    "elsewhere_gb": 0,  # the plain step's results are kept to compare with
}


def run_budgets(family: Family) -> list[Run]:
    model, batch = family.make(), family.batch("usual")
    with restored_buffers(model):
        plain = train_step(model, batch)
    smallest = memopt.plan(model, 1000, batch, **EXACT).smallest_gb()
    runs = []
    for share in SHARES:
        budget_gb = smallest + share * (plain.peak_bytes / GIB - smallest)
        with restored_buffers(model):
            memopt.optimize(model, budget_gb, **EXACT)
            step = train_step(model, batch)
            plan = memopt.plan_of(model)
            memopt.remove(model)
        assert plan.schedule is not None
        runs.append(
            Run(
                family.name,
                share,
                budget_gb * 1024,
                step.peak_bytes / 2**20,
                plan.predicted_peak_bytes / 2**20,
                difference(step, plain),
                plan.added_time,
                plan.bound,
                1 + max(plan.schedule.recomputed().values(), default=0),
            )
        )
    return runs


def compare_with_checkpointing(family: Family) -> Checkpointing:
    assert family.per_block_checkpoint is not None
    model, batch = family.make(), family.batch("usual")
    plan = memopt.plan(model, 1000, batch, **EXACT)
    family.per_block_checkpoint(model)
    peak_gb = train_step(model, batch).peak_bytes / GIB
    per_block = next(recipe for recipe in plan.recipes() if recipe.name == "per block")
    here = plan.at(peak_gb).added_time
    return Checkpointing(family.name, peak_gb * 1024, plan.smallest_gb() * 1024, per_block.added_time, here)


def runs_table(runs: list[Run]) -> Table:
    table = Table(title="Seven budgets a family")
    for column in (
        "family",
        "share",
        "budget MB",
        "measured",
        "predicted/measured",
        "differs by",
        "added",
        "bound",
        "evaluations",
    ):
        table.add_column(column, justify="left" if column == "family" else "right")
    for run in runs:
        ratio = f"{run.predicted_mb / run.measured_mb:.4f}"
        differs = f"{run.largest_difference:.1e}" if run.largest_difference else "bitwise equal"
        row = (f"{run.share:.2f}", f"{run.budget_mb:.2f}", f"{run.measured_mb:.2f}", ratio, differs)
        table.add_row(run.family, *row, f"{run.added_time:.1%}", f"{run.bound:.1%}", str(run.most_evaluations))
    return table


def checkpointing_table(rows: list[Checkpointing]) -> Table:
    table = Table(title="Beside checkpointing per block")
    for column in ("family", "its peak MB", "smallest here MB", "its added time", "added here at its peak"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for row in rows:
        peaks = (f"{row.checkpointed_mb:.2f}", f"{row.smallest_mb:.2f}")
        table.add_row(row.family, *peaks, f"{row.added_time_per_block:.1%}", f"{row.added_time_here:.1%}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BY_NAME)
    only = parser.parse_args().only
    families = [BY_NAME[only]] if only else list(BY_NAME.values())
    runs = [run for family in families for run in run_budgets(family)]
    rows = [compare_with_checkpointing(family) for family in families if family.repeated_blocks]
    if not only:
        result = stamp() | {"runs": [asdict(run) for run in runs], "checkpointing": [asdict(row) for row in rows]}
        write_result(RESULT, result)
    console = Console(width=130)
    console.print(runs_table(runs))
    console.print(checkpointing_table(rows))


if __name__ == "__main__":
    main()

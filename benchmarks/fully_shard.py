"""FSDP2 on two or four ranks with 100 MB and more of parameters: peaks and predictions at three budgets between plain
FSDP2's peak and the smallest, losses and gradients against plain FSDP2's, and floating-point operations against
checkpoints at every block, within the peak of those; one JSON file and a table.

    python -m benchmarks.fully_shard [--ranks 2 4] [--models GPT-2 Llama ViT]

The ranks are processes of this machine that exchange tensors by gloo. Peaks are those of whole steps with AdamW after the
first one, optimiser's step and gloo's copies included.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed, multiprocessing
from torch.utils import flop_counter

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.fully_shard import FAMILIES, planned, train_step
from memopt.compat.subclasses import shard_of

RESULT = Path(__file__).parent / "results" / "fully_shard.json"
SHARES = (0.1, 0.4, 0.7)
"""Where the budgets lie between the smallest and plain FSDP2's peak."""
STEPS = 2


# As torch.compile has it: a dispatch mode that is not part of its machinery keeps it from capturing anything.
flop_counter._FlopCounterMode.is_infra_mode = classmethod(lambda cls: True)  # type: ignore[method-assign, assignment]


def train(
    rank: int, ranks: int, name: str, budget_gb: float | None, *, checkpointed: bool = False, count: bool = True
) -> dict[str, Any]:
    """Train some steps; the loss and the gradients of all of them, the peak after the first, the operations of one."""
    family = FAMILIES[name]
    model = family.sharded(ranks, checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if budget_gb is not None:
        planned(model, budget_gb, optimizer)
    values: list[Tensor] = []
    peak_gb = 0.0
    for step in range(STEPS):
        batch = family.batch(100 * rank + step)
        gc.collect()
        torch.manual_seed(step + rank)
        with memopt.measure_peak("cpu") as peak:
            loss = train_step(model, optimizer, batch)
        peak_gb = max(peak_gb, peak.gb if step else 0.0)
        values += [loss, *(shard_of(value.grad).clone() for value in model.parameters() if value.grad is not None)]
        optimizer.zero_grad()
    found: dict[str, Any] = {"values": values, "peak_gb": peak_gb}
    if count:
        found["flops"] = operations(model, batch)
    if budget_gb is not None:
        plan = memopt.plan_of(model)
        found |= {"predicted_gb": plan.predicted_peak_gb, "added_time": plan.added_time}
    return found


def operations(model: Any, batch: dict[str, Tensor]) -> int:
    """The floating-point operations of a forward and backward, by torch's formulas."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    model.zero_grad()
    return counter.get_total_flops()


def smallest_gb(rank: int, ranks: int, name: str) -> float:
    """The smallest budget that works on all ranks."""
    family = FAMILIES[name]
    model = family.sharded(ranks)
    planned(model, 0.01, torch.optim.AdamW(model.parameters(), foreach=False))
    try:
        model(**family.batch(100 * rank))
    except memopt.BudgetError as error:
        return error.smallest_gb
    raise AssertionError("a step of 100 MB of parameters fits 0.01 GB")


def compared(found: dict[str, Any], plain: dict[str, Any]) -> float:
    """The largest difference between two runs' values, each as a part of the largest magnitude of its tensor."""
    pairs = zip(found.pop("values"), plain["values"], strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)


def of_model(rank: int, ranks: int, name: str) -> list[dict[str, Any]]:
    """The rows of one model, as this rank sees them."""
    plain = train(rank, ranks, name, None)
    by_hand = train(rank, ranks, name, None, checkpointed=True)
    least = smallest_gb(rank, ranks, name)
    budgets = [least + share * (plain["peak_gb"] - least) for share in SHARES]
    rows = [{"way": "plain", **plain}, {"way": "checkpoints at every block", **by_hand}]
    for budget_gb in (*budgets, by_hand["peak_gb"]):
        count = budget_gb == by_hand["peak_gb"]
        rows.append({"way": "planned", "budget_gb": budget_gb, **train(rank, ranks, name, budget_gb, count=count)})
    for row in rows[1:]:
        row["difference"] = compared(row, plain)
        if "flops" in row:
            row["more_flops"] = row["flops"] / plain["flops"] - 1
    return [{key: value for key, value in row.items() if key not in ("values", "flops")} for row in rows]


def on_rank(rank: int, folder: str, ranks: int, name: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    torch.save(of_model(rank, ranks, name), Path(folder) / str(rank))
    distributed.barrier()
    os._exit(0)  # the group's destructor may wait for itself


def rows(name: str, ranks: int) -> list[dict[str, Any]]:
    """The rows of one model on so many ranks, each with the peaks of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_rank, (folder, ranks, name), nprocs=ranks)
        of_ranks = [torch.load(Path(folder) / str(rank)) for rank in range(ranks)]
    found = []
    for same in zip(*of_ranks, strict=True):
        row = {"model": name, "ranks": ranks, **same[0]}
        row["peaks_gb"] = [one["peak_gb"] for one in same]
        del row["peak_gb"]
        if "difference" in row:
            row["difference"] = max(one["difference"] for one in same)
        found.append(row)
    return found


def show(found: list[dict[str, Any]]) -> None:
    table = Table("model", "ranks", "way", "budget", "predicted", "peaks of the ranks", "difference", "more operations")
    for row in found:
        table.add_row(
            row["model"],
            str(row["ranks"]),
            row["way"],
            f"{row['budget_gb']:.4f} GB" if "budget_gb" in row else "",
            f"{row['predicted_gb']:.4f} GB" if "predicted_gb" in row else "",
            ", ".join(f"{peak:.4f}" for peak in row["peaks_gb"]),
            f"{row['difference']:.1e}" if "difference" in row else "",
            f"{row['more_flops']:.1%}" if "more_flops" in row else "",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    given = parser.parse_args()
    found = [row for name in given.models for ranks in given.ranks for row in rows(name, ranks)]
    write_result(RESULT, {**stamp(), "rows": found})
    show(found)


if __name__ == "__main__":
    main()

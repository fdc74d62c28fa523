"""Two ranks under `DistributedDataParallel` with 100 MB of parameters: peaks against five budgets, gradients against
plain DDP's; one JSON file and a table.

    python -m benchmarks.ddp [--budgets 0.425 0.44 0.455 0.47 0.485]

The ranks are two processes of this machine that exchange gradients by gloo. Peaks are metered from the making of the
model on, so that the buckets are among them. For the first, third and fifth budget the model is optimised before it is
wrapped, for the others after. Seconds are those of the last step, with both ranks on the same cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed, multiprocessing

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.ddp import Order, train_step, wrapped

RESULT = Path(__file__).parent / "results" / "ddp.json"
BUDGETS = (0.425, 0.44, 0.455, 0.47, 0.485)
ACCUMULATING = 0.53
STEPS = 3


def train(rank: int, budget_gb: float | None, order: Order, views: bool, accumulate: int) -> dict[str, Any]:
    """Train with AdamW; the peak, hashes of the loss and all gradients of each step, and the last step's seconds."""
    hashes = []
    with memopt.measure_peak() as peak:
        model = wrapped(budget_gb, order, gradient_as_bucket_view=views)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            start = time.perf_counter()
            hashes.append(train_step(model, optimizer, rank, step, accumulate))
            seconds = time.perf_counter() - start
    plan = None if budget_gb is None else memopt.plan_of(model)
    return {
        "hashes": hashes,
        "peak_gb": peak.gb,
        "seconds": seconds,
        "added_time": plan and plan.added_time,
        "regions": plan and len(plan.regions),
    }


def on_rank(rank: int, folder: str, cases: list[tuple[Any, ...]]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    torch.save([train(rank, *case) for case in cases], Path(folder) / str(rank))
    distributed.barrier()
    os._exit(0)  # the group's destructor may wait for itself


def rows(budgets: list[float]) -> list[dict[str, Any]]:
    orders: tuple[Order, Order] = ("before", "after")
    cases: list[tuple[Any, ...]] = [(None, "before", True, 1), (None, "before", False, 2)]
    cases += [(budget_gb, orders[number % 2], True, 1) for number, budget_gb in enumerate(budgets)]
    cases += [(ACCUMULATING, "before", False, 2)]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(on_rank, (folder, cases), nprocs=2)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(2)]
    plain = {1: [rank[0] for rank in ranks], 2: [rank[1] for rank in ranks]}
    found = []
    for number, (budget_gb, order, views, accumulate) in enumerate(cases):
        pair = [rank[number] for rank in ranks]
        found.append({
            "budget_gb": budget_gb,
            "optimised": None if budget_gb is None else order,
            "gradient_as_bucket_view": views,
            "accumulate": accumulate,
            "peaks_gb": [rank["peak_gb"] for rank in pair],
            "equal": [one["hashes"] == other["hashes"] for one, other in zip(pair, plain[accumulate], strict=True)],
            "added_time": pair[0]["added_time"],
            "regions": pair[0]["regions"],
            "seconds": max(rank["seconds"] for rank in pair),
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    found = rows(parser.parse_args().budgets)
    write_result(RESULT, {**stamp(), "rows": found})
    table = Table("budget", "optimised", "views", "accumulate", "peaks of the ranks", "gradients", "added", "seconds")
    for row in found:
        table.add_row(
            "plain" if row["budget_gb"] is None else f"{row['budget_gb']} GB",
            row["optimised"],
            str(row["gradient_as_bucket_view"]),
            str(row["accumulate"]),
            ", ".join(f"{peak:.4f} GB" for peak in row["peaks_gb"]),
            "equal" if all(row["equal"]) else "differ",
            "" if row["added_time"] is None else f"{row['added_time']:.1%}",
            f"{row['seconds']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()

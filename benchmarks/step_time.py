"""Predicted beside measured seconds of forward and backward, by data sheets and calibrated: a table, and a JSON file.

    python -m benchmarks.step_time [--only "Llama 1B"]
    OMP_NUM_THREADS=1 python -m benchmarks.step_time --small   # at sizes that take a CPU half a second

GPT-2 medium, Llama 1B, ViT-L/16, BERT-large, ResNet-50 and U-Net, planned with room for everything and at half of that,
and run by the backend that "auto" picks for the device. Measured is the median of repeated steps after warming up; the
optimizer's step is not in it, nor in what is predicted. A calibration that is on disk is used (`MEMOPT_CACHE_DIR`).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.gpu_models import Candidate, candidates
from benchmarks.stamp import stamp, write_result

RESULT = Path(__file__).parent / "results" / "step_time.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOMY_GB = 100_000.0
SHARES = (1.0, 0.5)
"""Budgets, as shares of the way from the smallest that works to the plain step's peak."""


@dataclass(frozen=True)
class Row:
    model: str
    share: float
    table_ms: float
    """The step's time predicted from the table of devices."""
    calibrated_ms: float
    measured_ms: float
    fastest_ms: float
    """The time of the fastest measured step."""
    planning_s: float
    """Seconds of planning and compiling, and of calibration where none is on disk."""

    @property
    def errors(self) -> tuple[float, float]:
        """Return the errors of both predictions as fractions of the measured time."""
        return self.table_ms / self.measured_ms - 1, self.calibrated_ms / self.measured_ms - 1


def make(candidate: Candidate) -> tuple[torch.nn.Module, dict[str, Any]]:
    with torch.device(DEVICE):
        return candidate.make(), candidate.batch(candidate.size)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


# On one CPU thread, its own time: beside other work on the machine the wall's says little.
CLOCK = time.process_time if DEVICE == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def step_seconds(model: torch.nn.Module, batch: dict[str, Any], steps: int) -> list[float]:
    """Return seconds of repeated forwards and backwards; gradients are freed between them."""
    seconds = []
    for _ in range(steps + 3):
        model.zero_grad()
        wait()
        begin = CLOCK()
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        wait()
        seconds.append(CLOCK() - begin)
    return seconds[3:]


def compare(candidate: Candidate, steps: int) -> list[Row]:
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    rows = []
    for share in SHARES:
        print(f"{candidate.name}: {share:.0%}", file=sys.stderr)
        model, batch = make(candidate)
        options: dict[str, Any] = {"optimizer": None, "precision": precision}
        roomy = memopt.plan(model, ROOMY_GB, batch, **options)
        least = roomy.smallest_gb()
        budget_gb = least + share * (max(roomy.plain_peak_gb, roomy.predicted_peak_gb) - least)
        budget_gb *= 1.02 if share == 1.0 else 1.0  # for what a lowered graph holds otherwise
        by_table = memopt.plan(model, budget_gb, batch, **options)
        begin = time.perf_counter()
        memopt.optimize(model, budget_gb, calibrate=True, **options)
        seconds = step_seconds(model, batch, steps)
        planning = time.perf_counter() - begin - sum(seconds)
        plan = memopt.plan_of(model)
        rows.append(
            Row(
                candidate.name,
                share,
                1e3 * (by_table.step_seconds + by_table.added_seconds),
                1e3 * (plan.step_seconds + plan.added_seconds),
                1e3 * statistics.median(seconds),
                1e3 * min(seconds),
                planning,
            )
        )
        del model, batch, plan, roomy, by_table
        torch._dynamo.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title=f"Seconds of forward and backward, {DEVICE}")
    for title in (
        "model",
        "budget",
        "by table ms",
        "calibrated ms",
        "measured ms",
        "fastest ms",
        "error",
        "calibrated",
    ):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        times = (row.table_ms, row.calibrated_ms, row.measured_ms, row.fastest_ms)
        errors = (f"{error:+.1%}" for error in row.errors)
        table.add_row(row.model, f"{row.share:.0%}", *(f"{seconds:.2f}" for seconds in times), *errors)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--note", default="", help="what else the machine was doing, for the JSON file")
    parser.add_argument("--to", type=Path, default=RESULT, help="the JSON file")
    chosen = parser.parse_args()
    if not chosen.small and DEVICE == "cpu":
        sys.exit("no GPU here: --small runs the same code at sizes for a CPU")
    rows: list[Row] = []
    for candidate in candidates("middle" if chosen.small else "real").values():
        if chosen.only in (None, candidate.name):
            rows += compare(candidate, 10 if chosen.small else 20)
            result = {
                **stamp(),
                "small": chosen.small,
                "clock": CLOCK.__name__,
                "note": chosen.note,
                "rows": [*map(asdict, rows)],
            }
            write_result(chosen.to, result)
    show(rows)


if __name__ == "__main__":
    main()

"""Budgets kept on this machine's card: six models by five budgets, free and with the card capped, and a JSON file.

    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m benchmarks.budgets_on_card [--only "Llama 1B"]
    python -m benchmarks.budgets_on_card --small      # the same at tiny sizes, on the CPU where there is no GPU

Whole steps with AdamW. For each budget, between the smallest that works and the plain step's peak: the peak of torch's
allocator within the budget, and within 3% of what was predicted; then, on a GPU, what the process holds of the card,
and 100 steps more with the process held to the budget (`torch.cuda.set_per_process_memory_fraction`) without running
out of memory. Nothing else may use the card meanwhile. On the CPU peaks are those of its allocator, uncapped.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks.gpu_models import Candidate, candidates
from benchmarks.stamp import stamp, write_result
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "budgets_on_card.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARES = (0.02, 0.25, 0.5, 0.75, 1.0)
"""Budgets, as shares of the way from the smallest that works to the plain peak."""
ROOMY_GB = 100_000.0
CLOSE = 0.03
CAPPED_STEPS = 100


@dataclass(frozen=True)
class Row:
    model: str
    share: float
    budget_gb: float
    predicted_gb: float
    """The predicted peak of what torch's allocator counts."""
    allocated_gb: float = 0.0
    """`max_memory_allocated`; on the CPU the meter's."""
    predicted_process_gb: float | None = None
    """The predicted peak of the process, the context and the holes in the allocator's memory included."""
    process_gb: float | None = None
    """The process's peak on the card, uncapped: more than the budget if the allocator kept what it could."""
    capped_gb: float | None = None
    """`process_gb` while the process was held to the budget."""
    capped_steps: int = 0
    failure: str = ""

    @property
    def kept(self) -> bool:
        within = self.allocated_gb <= self.budget_gb and (self.capped_gb or 0.0) <= self.budget_gb
        return within and not self.failure

    @property
    def close(self) -> bool:
        return abs(self.predicted_gb / self.allocated_gb - 1) <= CLOSE if self.allocated_gb else False


def used_by_others() -> int:
    """Bytes of the card that are in use before this process takes any: asked of the driver, since torch cannot be asked
    without taking some."""
    if DEVICE == "cpu":
        return 0
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return int(lines[int(visible) if visible.isdecimal() else 0]) * 1024**2


def process_gb(others: int) -> float:
    """The most that this process held since the statistics were reset: what the driver says is used now, less `others`,
    and what the allocator has given back since."""
    free, total = torch.cuda.mem_get_info()
    given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return (total - free - others + given_back) / GIB


def budgets(candidate: Candidate, options: dict[str, Any]) -> list[float]:
    with torch.device(DEVICE):
        model, batch = candidate.make(), candidate.batch(candidate.size)
    roomy = memopt.plan(model, ROOMY_GB, batch, **options)
    least = roomy.smallest_gb()
    return [least + share * (max(roomy.plain_peak_gb, least) - least) for share in SHARES]


def stepper(
    candidate: Candidate, budget_gb: float, options: dict[str, Any]
) -> tuple[torch.nn.Module, Callable[[], None]]:
    with torch.device(DEVICE):
        model, batch = candidate.make(), candidate.batch(candidate.size)
    memopt.optimize(model, budget_gb, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()

    return model, step


def run(candidate: Candidate, share: float, budget_gb: float, others: int, options: dict[str, Any]) -> Row:
    print(f"{candidate.name}: {budget_gb:.4g} GB", file=sys.stderr)
    found: dict[str, Any] = {"model": candidate.name, "share": share, "budget_gb": budget_gb, "predicted_gb": 0.0}
    try:
        model, step = stepper(candidate, budget_gb, options)
        step()  # compiles, and makes the optimiser's state
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with memopt.measure_peak(DEVICE) as peak:
            step()
        plan = memopt.plan_of(model)
        found["predicted_gb"] = plan.predicted_peak_gb - plan.account.uncounted_bytes / GIB
        found["allocated_gb"] = peak.gb
        if DEVICE == "cuda":
            found |= {"predicted_process_gb": plan.predicted_peak_gb, "process_gb": process_gb(others)}
            found |= capped(step, budget_gb, plan.account.context, others)
    except (RuntimeError, ValueError) as failure:  # out of memory, or refused
        found["failure"] = f"{type(failure).__name__}: {str(failure)[:200]}"
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    return Row(**found)


def capped(step: Callable[[], None], budget_gb: float, context: int, others: int) -> dict[str, Any]:
    """Take steps while the allocator may hold no more than the budget less the context; returns fields of a `Row`."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((budget_gb * GIB - context) / total)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(CAPPED_STEPS):
        step()
    torch.cuda.synchronize()
    return {"capped_gb": process_gb(others), "capped_steps": CAPPED_STEPS}


def forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def show(rows: list[Row]) -> None:
    table = Table(title=f"Budgets on {DEVICE}, GB of 1024³")
    for title in (
        "model",
        "budget",
        "predicted",
        "allocated",
        "off",
        "process",
        "capped",
        "steps",
        "kept",
        "within 3%",
    ):
        table.add_column(title, justify="left" if title == "model" else "right")
    for row in rows:
        off = f"{row.predicted_gb / row.allocated_gb - 1:+.2%}" if row.allocated_gb else "–"
        process = ("–" if size is None else f"{size:.4g}" for size in (row.process_gb, row.capped_gb))
        sizes = (f"{size:.4g}" for size in (row.budget_gb, row.predicted_gb, row.allocated_gb))
        said = row.failure.partition(":")[0] if row.failure else "yes" if row.kept else "no"
        table.add_row(row.model, *sizes, off, *process, str(row.capped_steps), said, "yes" if row.close else "no")
    Console(width=120).print(table)
    print(f"{sum(row.kept for row in rows)} of {len(rows)} kept, {sum(row.close for row in rows)} within {CLOSE:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one model")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--to", type=Path, default=RESULT, help="the JSON file")
    chosen = parser.parse_args()
    if not chosen.small and DEVICE == "cpu":
        sys.exit("no GPU here, so nothing to show of a card; --small proves this script on the CPU")
    others = used_by_others()
    # The context is measured, and kept, where it is on a GPU: it is what the process holds that no plan can count.
    options: dict[str, Any] = {"precision": "bf16" if DEVICE == "cuda" else "fp32", "calibrate": DEVICE == "cuda"}
    rows: list[Row] = []
    for candidate in candidates("tiny" if chosen.small else "real").values():
        if chosen.only not in (None, candidate.name):
            continue
        asked = budgets(candidate, options)
        forget()
        for share, budget_gb in zip(SHARES, asked, strict=True):
            rows.append(run(candidate, share, budget_gb, others, options))
            forget()
            setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            result = {**stamp(), "small": chosen.small, "allocator": setting, "rows": [*map(asdict, rows)]}
            write_result(chosen.to, result)
    show(rows)


if __name__ == "__main__":
    main()

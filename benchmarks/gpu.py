"""memopt beside what people use today, at equal measured peak, on this machine's GPU: a table, and a JSON file.

    python -m benchmarks.gpu [--only "Llama 1B" U-Net] [--no-batches]
    python -m benchmarks.gpu --small      # the same code at tiny sizes, on the CPU where there is no GPU

GPT-2 medium, Llama 1B, ViT-L/16, BERT-large, ResNet-50 and U-Net, whole steps with AdamW, bf16 (fp32 with `--small`).
Every recipe trains first; then memopt, by inductor and by plain operators, with each recipe's measured peak as its
budget (on a GPU with what torch's allocator reserved for it, since a budget is for the whole process), and at half of
what plain torch.compile adds to parameters and optimizer. Times are medians of repeated steps after warming up, all in
this process; peaks are what torch's allocator handed out in one step. The largest batches are found by trial for the
recipes, by planning for memopt.
"""

from __future__ import annotations

import argparse
import gc
import json
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
from benchmarks.gpu_methods import Method, adamw, lasting_bytes, peers, within
from benchmarks.gpu_models import Candidate, candidates
from benchmarks.stamp import stamp, write_result
from memopt.device.hardware import assumed_context
from memopt.errors import GIB

RESULTS = Path(__file__).parent / "results"
CARDS_GB, SMALL_CARDS_GB = (12, 24, 80), (0.02, 0.05)
BATCH_RECIPES = ("eager", "eager, per block", "compile", "compile, per block")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = "half of compile's"
# What memopt's budgets count and torch's allocator does not.
UNSEEN = assumed_context(torch.cuda.get_device_capability()[0]) if DEVICE == "cuda" else 0


@dataclass(frozen=True)
class Run:
    model: str
    method: str
    at: str
    """The recipe whose measured peak was the budget; empty for recipes themselves."""
    peak_gb: float | None = None
    step_ms: float | None = None
    per_second: float | None = None
    """Tokens, or images, per second."""
    held_gb: float | None = None
    """The part of the peak that is parameters, buffers, optimizer's state and batch."""
    reserved_gb: float | None = None
    """The most that torch's allocator reserved; on the CPU the peak."""
    predicted_gb: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class Largest:
    model: str
    method: str
    card_gb: float
    batch: int


@dataclass(frozen=True)
class Training:
    """A measured training: bytes at the peak, held between steps and reserved, seconds of steps, memopt's plan."""

    peak: float
    held: float
    reserved: float
    seconds: list[float]
    plan: memopt.Plan | None


def train(method: Method, candidate: Candidate, size: int, steps: int, warm: int) -> Training:
    with torch.device(DEVICE):
        model, batch = candidate.make(), candidate.batch(size)
    method.prepare(model, candidate)
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        with method.autocast(DEVICE):
            output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()

    seconds = []
    with method.settings():
        for _ in range(warm):
            step()
        if DEVICE == "cuda":  # what compiling reserved is no part of a step
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with memopt.measure_peak(DEVICE) as peak:
            step()
        reserved = torch.cuda.max_memory_reserved() if DEVICE == "cuda" else peak.bytes
        for _ in range(steps):
            wait()
            begin = time.perf_counter()
            step()
            wait()
            seconds.append(time.perf_counter() - begin)
    held = lasting_bytes(model, optimizer, batch)
    return Training(peak.bytes, held, reserved, seconds, memopt.plan_of(model) if method.memopt else None)


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def forget() -> None:
    """Drop compiled code and free the memory of the run before."""
    torch._dynamo.reset()
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def run(method: Method, candidate: Candidate, at: str = "", *, small: bool) -> Run:
    made = Run(candidate.name, method.name, at)
    print(f"{candidate.name}: {method.name}{' at the peak of ' * bool(at)}{at}", file=sys.stderr)
    try:
        made_of = train(method, candidate, candidate.size, 3 if small else 20, 2 if small else 4)
    except (RuntimeError, ValueError, AssertionError) as failure:  # out of memory, refused, or not to be compiled
        return Run(**{**asdict(made), "failure": f"{type(failure).__name__}: {str(failure)[:200]}"})
    finally:
        forget()
    median, plan = statistics.median(made_of.seconds), made_of.plan
    return Run(
        candidate.name,
        method.name,
        at,
        made_of.peak / GIB,
        median * 1e3,
        candidate.size * candidate.tokens / median,
        made_of.held / GIB,
        made_of.reserved / GIB,
        None if plan is None else plan.predicted_peak_gb - plan.account.uncounted_bytes / GIB,
    )


def compare(candidate: Candidate, *, small: bool) -> list[Run]:
    """Run all recipes, and memopt with the peak of each recipe as its budget."""
    recipes = [run(method, candidate, small=small) for method in peers(small=small)]
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    ours = []
    for recipe in recipes:
        if recipe.peak_gb is None:
            continue
        assert recipe.reserved_gb is not None
        assert recipe.held_gb is not None
        for backend in ("inductor", "aten") if recipe.method in ("eager", "eager, per block") else ("inductor",):
            budget_gb = recipe.reserved_gb + UNSEEN / GIB
            ours.append(run(within(budget_gb, backend, precision), candidate, recipe.method, small=small))
        if recipe.method == "compile":
            budget_gb -= (recipe.peak_gb - recipe.held_gb) / 2
            ours.append(run(within(budget_gb, "inductor", precision), candidate, HALF, small=small))
    return [*recipes, *ours]


def largest(candidate: Candidate, card_gb: float) -> list[Largest]:
    """Find the largest batch of each recipe by trial, and memopt's by planning."""
    found = [
        Largest(candidate.name, method.name, card_gb, largest_by_trial(method, candidate, card_gb))
        for method in peers(small=True)
        if method.name in BATCH_RECIPES
    ]
    with torch.device("meta"):
        model = candidate.make()

    def inputs(size: int) -> Any:
        with torch.device("meta"):
            return candidate.batch(size)

    try:
        size = memopt.max_batch(model, card_gb, inputs)
    except memopt.BudgetError:
        size = 0
    forget()
    return [*found, Largest(candidate.name, "memopt", card_gb, size)]


def largest_by_trial(method: Method, candidate: Candidate, card_gb: float) -> int:
    """Return the largest batch that fits, within an eighth: doubled while it fits, then by bisection."""

    def fits(size: int) -> bool:
        try:
            return train(method, candidate, size, 0, 1).reserved + UNSEEN <= card_gb * GIB
        except RuntimeError:  # out of memory
            return False
        finally:
            forget()

    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def show(runs: list[Run], batches: list[Largest]) -> None:
    console, ours = (
        Console(width=120),
        {(run.model, run.at): run for run in runs if run.method == "memopt (inductor)"},
    )
    table = Table(title=f"Step time at equal measured peak, {DEVICE}")
    for title in ("model", "recipe", "peak GB", "ms", "per second", "memopt GB", "ms", "of the recipe's"):
        table.add_column(title, justify="left" if title in ("model", "recipe") else "right")
    for run in runs:
        if not run.at:
            table.add_row(run.model, run.method, *_cells(run), *_cells(ours.get((run.model, run.method)), run))
        if run.method == "compile":
            table.add_row(run.model, HALF, "", "", "", *_cells(ours.get((run.model, HALF)), run))
    console.print(table)
    if batches:
        table = Table("model", "GB", *dict.fromkeys(largest.method for largest in batches), title="Largest batch")
        for model, card in dict.fromkeys((batch.model, batch.card_gb) for batch in batches):
            here = [batch.batch for batch in batches if (batch.model, batch.card_gb) == (model, card)]
            table.add_row(model, str(card), *map(str, here))
        console.print(table)


def _cells(run: Run | None, beside: Run | None = None) -> list[str]:
    if run is None or run.step_ms is None or run.peak_gb is None or run.per_second is None:
        return ["–", (run.failure.partition(":")[0] if run else "–"), "–"]
    last = f"{run.per_second:,.0f}" if beside is None else f"{run.step_ms / (beside.step_ms or 1.0):.2f}"
    return [f"{run.peak_gb:.4g}", f"{run.step_ms:.1f}", last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [candidate.name for candidate in candidates("tiny").values()]
    parser.add_argument("--only", nargs="+", choices=names, help="the records of other models remain in the file")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--no-batches", action="store_true", help="without the largest batches")
    parser.add_argument("--to", type=Path, help="the JSON file")
    chosen = parser.parse_args()
    path = chosen.to or RESULTS / f"gpu{'_small' * chosen.small}.json"
    assert chosen.small or DEVICE == "cuda", "no GPU here: --small runs the same code at tiny sizes"
    names = chosen.only or names
    known = json.loads(path.read_text()) if chosen.only and path.exists() else {"runs": [], "batches": []}
    runs = [Run(**record) for record in known["runs"] if record["model"] not in names]
    batches = [Largest(**record) for record in known["batches"] if record["model"] not in names]
    for candidate in candidates("tiny" if chosen.small else "real").values():
        if candidate.name in names:
            runs += compare(candidate, small=chosen.small)
            cards = () if chosen.no_batches else SMALL_CARDS_GB if chosen.small else CARDS_GB
            batches += [found for card in cards for found in largest(candidate, card)]
            result = {**stamp(), "runs": [*map(asdict, runs)], "batches": [*map(asdict, batches)]}
            write_result(path, result)
    show(runs, batches)


if __name__ == "__main__":
    main()

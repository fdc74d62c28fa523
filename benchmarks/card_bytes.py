"""Bytes of training steps at real size on a CUDA card: predicted and allocated, in a process that has no more than the
budget.

    python -m benchmarks.card_bytes [--only "GPT-2 medium"] [--backends aten inductor] [--optimizers adamw fused]
        [--ways loop fp16 microbatches fp8 low_bit_optimizer]
    .venv-card/bin/python tests/card/stand_in/run.py -m benchmarks.card_bytes      # where there is no card

For each model, optimizer and backend: budgets from the smallest that works to the plain step's peak, and one that is
half a percent below the smallest, which must be refused. The steps run, from the first one on, while torch's allocator
may hold the budget less the context, and nothing else; "allocated" is `torch.cuda.max_memory_allocated` over the steps
after the first, which compiles.

Each job is a process of its own, and each record is written as it comes; what the file has is not run again. The
models' parameters are left as they are allocated: no byte depends on them. With the stand-in (docs/card.md) bytes are
those of a card and everything else is not.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import memopt
from benchmarks import processes
from benchmarks.card_models import card_models
from benchmarks.gpu_models import Size, made
from benchmarks.stamp import stamp, write_result
from memopt.compat.card import expandable_segments
from memopt.errors import GIB

RESULT = Path(__file__).parent / "results" / "card_bytes.json"
SHARES = (1.0, 0.5, 0.0, 0.25, 0.75, None)
"""Budgets, as shares of the way from the smallest to the plain peak; None: half a percent below the smallest. Those
that are planned quickly come first."""
REFUSED = 0.995
ROOMY_GB, TINY_GB = 100_000.0, 0.001
STEPS = 20
MOST = {"aten": 0.01, "inductor": 0.02}
"""The largest fraction by which a prediction may be above the bytes allocated."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


@dataclass(frozen=True)
class Way:
    """How a model is trained; by default in bf16 with the default levers, in a bare loop."""

    precision: str = "bf16"
    lever: str = ""
    """A lever that is off by default and is allowed here; empty for none."""
    microbatches: int = 0
    """The pieces of each batch for `TrainStep`; 0 for a bare loop without it."""


WAYS = {
    "loop": Way(),
    "fp16": Way("fp16", microbatches=1),  # TrainStep then has a GradScaler
    "microbatches": Way(microbatches=4),
    **{
        lever: Way(lever=lever)
        for lever in (
            "fp8",
            "fp8_delayed",
            "fp8_block",
            "mxfp8",
            "low_bit_optimizer",
            "offload_optimizer",
            "bf16_parameters",
        )
    },
}


@dataclass(frozen=True)
class Job:
    model: str
    optimizer: str
    backend: str
    expandable: bool = False
    way: str = "loop"
    size: Size = "real"
    shares: tuple[float | None, ...] = SHARES


@dataclass(frozen=True)
class Record:
    model: str
    optimizer: str
    backend: str
    expandable: bool
    way: str
    share: float | None
    """The budget as one of `SHARES`."""
    budget_gb: float
    predicted_gb: float | None = None
    """The predicted peak of what torch's allocator counts."""
    allocated_gb: float | None = None
    total_gb: float | None = None
    """The predicted peak of the process, the context and the holes in the allocator's memory included."""
    capped_reserved_gb: float | None = None
    """The most that the allocator held in the capped steps."""
    capped_steps: int = 0
    plan_seconds: float | None = None
    """Seconds of planning and compiling, or until the refusal; on this machine's CPU, whatever the card."""
    levers: str = ""
    """The levers that the plan uses beside recomputation."""
    failure: str = ""

    @property
    def off(self) -> float | None:
        """The fraction by which the prediction is above what was allocated; None without both."""
        return self.predicted_gb / self.allocated_gb - 1 if self.predicted_gb and self.allocated_gb else None

    @property
    def good(self) -> bool:
        """Whether the budget was kept and predicted closely, or refused where it must be."""
        if self.share is None:
            return self.failure.startswith("BudgetError")
        return self.capped_steps == STEPS and self.off is not None and 0 <= self.off <= MOST[self.backend]


JOB = ("model", "optimizer", "backend", "expandable", "way")
FIGURES = tuple(field.name for field in fields(Record) if field.name not in JOB)


def as_document(records: list[Record]) -> dict[str, Any]:
    """The records as they are written: a line for each job, with the figures of each budget in a row."""
    jobs: dict[tuple[Any, ...], list[list[Any]]] = {}
    for record in records:
        rows = jobs.setdefault(tuple(getattr(record, name) for name in JOB), [])
        rows.append([getattr(record, name) for name in FIGURES])
    lines = [dict(zip(JOB, job, strict=True)) | {"rows": rows} for job, rows in jobs.items()]
    return {**stamp(), "figures": FIGURES, "jobs": lines}


def records_of(document: dict[str, Any]) -> list[Record]:
    """The records of a document that `as_document` made."""
    return [
        Record(**{name: job[name] for name in JOB}, **dict(zip(document["figures"], row, strict=True)))
        for job in document["jobs"]
        for row in job["rows"]
    ]


def run(job: Job) -> Iterator[Record]:
    """Yield the records of a job."""
    model, batch = made(card_models(job.size)[job.model], filled=False)
    way = WAYS[job.way]
    allow = memopt.DEFAULT_LEVERS | ({way.lever} if way.lever else set())
    options: dict[str, Any] = {"backend": job.backend, "precision": way.precision, "allow": allow}
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    # Optimised once and then again with other budgets, the model keeps its captured graphs.
    memopt.optimize(model, ROOMY_GB, example_inputs=batch, optimizer=optimizer, **options)
    plain = memopt.plan_of(model).plain_peak_gb
    least = smallest_gb(model, batch, optimizer=optimizer, **options)
    for share in job.shares:
        budget_gb = REFUSED * least if share is None else least + share * max(0.0, plain - least)
        found: dict[str, Any] = {"share": share, "budget_gb": budget_gb}
        optimizer.state.clear()
        optimizer.zero_grad()
        begin = time.perf_counter()
        try:
            for figures in trained(model, optimizer, batch, budget_gb, options, way.microbatches):
                found |= figures
        except (RuntimeError, ValueError) as failure:  # out of memory, or refused
            found["failure"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:120]}"
            found.setdefault("plan_seconds", time.perf_counter() - begin)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            gc.collect()
            torch.cuda.empty_cache()
        yield Record(**{name: getattr(job, name) for name in JOB}, **found)
    memopt.remove(model)


def smallest_gb(model: torch.nn.Module, batch: Any, **options: Any) -> float:
    """The smallest budget that a refusal names, with all levers that are on by default. A model that is optimised is
    planned from its captured graphs, and keeps them."""
    try:
        memopt.optimize(model, TINY_GB, example_inputs=batch, **options)
    except memopt.BudgetError as refusal:
        return refusal.smallest_gb
    raise AssertionError(f"a plan for {TINY_GB} GB")


def trained(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    budget_gb: float,
    options: dict[str, Any],
    microbatches: int,
) -> Iterator[dict[str, Any]]:
    """Train within a budget, and yield fields of a `Record` as they are measured."""

    begin = time.perf_counter()
    memopt.optimize(model, budget_gb, example_inputs=batch, optimizer=optimizer, **options)
    step = stepping(model, memopt.wrap_optimizer(model, optimizer), batch, microbatches)
    card = torch.cuda.get_device_properties(0)
    torch.cuda.empty_cache()
    context = memopt.plan_of(model).account.context
    torch.cuda.set_per_process_memory_fraction((budget_gb * GIB - context) / card.total_memory)
    for done in range(STEPS):
        step()
        if not done:
            plan = memopt.plan_of(model)
            levers = ", ".join((*plan.levers, *plan.proposals))
            total, uncounted = plan.predicted_peak_gb, plan.account.uncounted_bytes / GIB
            seconds = time.perf_counter() - begin
            yield {"plan_seconds": seconds, "total_gb": total, "predicted_gb": total - uncounted, "levers": levers}
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        found = {"capped_steps": done + 1, "capped_reserved_gb": torch.cuda.max_memory_reserved() / GIB}
        yield found | ({"allocated_gb": torch.cuda.max_memory_allocated() / GIB} if done else {})


def stepping(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, microbatches: int
) -> Callable[[], object]:
    """A function that trains the model on the batch once: `TrainStep`, or where there are no microbatches a bare
    loop."""
    if microbatches:
        return partial(memopt.TrainStep(model, optimizer, microbatches=microbatches), batch)

    def step() -> None:
        optimizer.zero_grad()
        output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()

    return step


def in_process(job: Job) -> Iterator[Record]:
    """Yield a job's records, run in a process of its own, as they come."""
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if job.expandable else {}
    for record in processes.records_of("card_bytes", "--job", json.dumps(asdict(job)), **setting):
        yield Record(**record)


def show(records: list[Record]) -> None:
    """Print the records as a table."""
    table = Table(title="Bytes of training steps, GB of 1024³")
    for title in ("model", "optimizer", "backend", "budget", "predicted", "allocated", "off", "capped steps", ""):
        table.add_column(title, justify="left" if title in ("model", "optimizer", "backend", "") else "right")
    for record in records:
        sizes = ("–" if value is None else f"{value:.4g}" for value in (record.predicted_gb, record.allocated_gb))
        off = "–" if record.off is None else f"{record.off:+.2%}"
        said = "good" if record.good else record.failure[:40] or "off"
        names = (record.model, record.optimizer, record.backend + " expandable" * record.expandable + f", {record.way}")
        table.add_row(*names, f"{record.budget_gb:.4g}", *sizes, off, str(record.capped_steps), said)
    Console(width=150).print(table)
    print(f"{sum(record.good for record in records)} of {len(records)} good")


def share(text: str) -> float | None:
    """Parse a share from the command line; None for "refused"."""
    return None if text == "refused" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="models")
    parser.add_argument("--backends", nargs="+", default=list(MOST))
    parser.add_argument("--optimizers", nargs="+", default=["adamw"], choices=list(OPTIMIZERS))
    parser.add_argument("--ways", nargs="+", default=["loop"], choices=list(WAYS))
    parser.add_argument("--expandable", action="store_true", help="with expandable segments")
    parser.add_argument("--shares", nargs="+", type=share, default=SHARES, help="budgets; 'refused' for the one below")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that this program runs")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=RESULT, help="the JSON file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA card here, and no stand-in for one (tests/card/stand_in/run.py)")
    if chosen.job:
        job = Job(**json.loads(chosen.job))
        assert job.expandable == expandable_segments()
        for record in run(job):
            print(json.dumps(asdict(record)), flush=True)
        return
    size: Size = "tiny" if chosen.tiny else "real"
    records = records_of(json.loads(chosen.to.read_text())) if chosen.to.exists() else []
    names = chosen.only or list(card_models(size))
    for mine in product(names, chosen.optimizers, chosen.backends, [chosen.expandable], chosen.ways):
        done = {one.share for one in records if tuple(getattr(one, name) for name in JOB) == mine}
        shares = tuple(share for share in chosen.shares if share not in done)
        # Once they have trained, parameters in bfloat16 stay so.
        alone = mine[-1] == "bf16_parameters"
        for some in [(one,) for one in shares] if alone else [shares] if shares else []:
            for record in in_process(Job(*mine, size, some)):
                records.append(record)
                write_result(chosen.to, as_document(records))
                print(record, file=sys.stderr, flush=True)
    show(records)


if __name__ == "__main__":
    main()

"""The budgets that refusals name, tried: whether the figure works at the second try, and whether a process that has no
more than its budget runs out of memory.

    python -m benchmarks.named_on_card [--only ConvNeXt-B] [--backend aten] [--tiny]
    .venv-card/bin/python tests/card/stand_in/run.py -m benchmarks.named_on_card      # where there is no card

Ten vision models, in bf16 with the fused AdamW, each in a process of its own. "fresh": the process begins with a
refusal and takes the figure that it names. Then three other budgets; and "used": there is a refusal again, and its
figure is taken. All runs are held to their budgets as in `benchmarks.card_bytes`, from their first step on; what the
plan predicts is set beside what torch's allocator gives out in the steps after the first. A model whose process was
ended is begun again by the next call, with the plans that are on disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import memopt
from benchmarks.card_bytes import MOST, TINY_GB
from benchmarks.gpu_models import Size, made
from benchmarks.processes import records_of
from benchmarks.stamp import stamp, write_result
from benchmarks.vision_models import VISION
from memopt.errors import GIB, round_up

RESULT = Path(__file__).parent / "results" / "named_on_card.json"
STEPS = 8
ROOMY_GB = 100_000.0
BETWEEN = (1.06, 0.5, 1.0)
"""The other budgets: a multiple of the smallest, and two shares of the way from there to the plain step's peak."""
Kind = Literal["fresh", "other", "used"]


@dataclass(frozen=True)
class Trial:
    """One budget, and what happened in a process that has no more."""

    model: str
    kind: Kind
    budget_gb: float
    steps: int = 0
    reserved_gb: float = 0.0
    """The most that torch's allocator held."""
    predicted_gb: float = 0.0
    """The predicted peak of what torch's allocator counts."""
    allocated_gb: float = 0.0
    """The most that torch's allocator had allocated in the steps after the first."""
    added_time: float = 0.0
    failure: str = ""
    seconds: float = 0.0
    """Seconds of planning on this machine's CPU."""

    @property
    def off(self) -> float:
        """The fraction by which the prediction is above what was allocated."""
        return self.predicted_gb / self.allocated_gb - 1 if self.allocated_gb else 0.0

    @property
    def good(self) -> bool:
        return self.steps == STEPS and not self.failure and 0 <= self.off <= MOST["aten"]


class Job:
    """A model, its optimizer and a batch on the card, for trials one after the other."""

    def __init__(self, name: str, size: Size, backend: str) -> None:
        self.name = name
        self.model, self.batch = made(VISION[name](size), filled=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.options: dict[str, Any] = {"optimizer": self.optimizer, "precision": "bf16", "backend": backend}

    def optimize(self, budget_gb: float) -> None:
        memopt.optimize(self.model, budget_gb, example_inputs=self.batch, **self.options)

    def named_gb(self) -> float:
        """The smallest budget in GB that the text of a refusal names."""
        try:
            self.optimize(TINY_GB)
        except memopt.BudgetError as refusal:
            return float(round_up(refusal.smallest_gb))
        raise AssertionError(f"a plan for {TINY_GB} GB")

    def plain_gb(self) -> float:
        """The plain step's peak."""
        self.optimize(ROOMY_GB)
        return memopt.plan_of(self.model).plain_peak_gb

    def tried(self, kind: Kind, budget_gb: float) -> Trial:
        """A trial of this budget; the optimizer's state and the gradients are as in the beginning."""
        self.optimizer.state.clear()
        self.optimizer.zero_grad()
        found: dict[str, Any] = {}
        begin = time.perf_counter()
        try:
            self.optimize(budget_gb)
            plan = memopt.plan_of(self.model)
            predicted_gb = plan.predicted_peak_gb - plan.account.uncounted_bytes / GIB
            seconds = time.perf_counter() - begin
            found = {"added_time": plan.added_time, "seconds": seconds, "predicted_gb": predicted_gb}
            self._cap(budget_gb * GIB - plan.account.context)
            reserved = 0
            for done in range(STEPS):
                self._step()
                reserved = max(reserved, torch.cuda.max_memory_reserved())
                found |= {"steps": done + 1, "reserved_gb": reserved / GIB}
                if done:
                    found["allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
                else:
                    torch.cuda.reset_peak_memory_stats()
        except (RuntimeError, ValueError) as failure:  # out of memory, or refused
            found["failure"] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()
        return Trial(self.name, kind, budget_gb, **found)

    def _cap(self, limit_bytes: float) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
        torch.cuda.reset_peak_memory_stats()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        output = self.model(**self.batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        self.optimizer.step()


def trials(name: str, size: Size, backend: str) -> Iterator[Trial]:
    """The trials of a model, in this process."""
    job = Job(name, size, backend)
    named_gb = job.named_gb()
    yield job.tried("fresh", named_gb)
    plain = job.plain_gb()
    multiple, *shares = BETWEEN
    for budget_gb in (multiple * named_gb, *(named_gb + share * max(0.0, plain - named_gb) for share in shares)):
        yield job.tried("other", budget_gb)
    job.optimizer.state.clear()
    job.optimizer.zero_grad()
    yield job.tried("used", job.named_gb())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="models", default=list(VISION))
    parser.add_argument("--backend", default="aten")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=RESULT, help="the JSON file; models that it has are not run again")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA card here, and no stand-in for one (tests/card/stand_in/run.py)")
    if chosen.job:
        for trial in trials(*json.loads(chosen.job)):
            print(json.dumps(asdict(trial)), flush=True)
        return
    rows = [Trial(**row) for row in json.loads(chosen.to.read_text())["rows"]] if chosen.to.exists() else []
    for name in chosen.only:
        if sum(row.model == name for row in rows) == len(BETWEEN) + 2:
            continue
        rows = [row for row in rows if row.model != name]
        job = json.dumps((name, "tiny" if chosen.tiny else "real", chosen.backend))
        for record in records_of("named_on_card", "--job", job):
            rows.append(Trial(**record))
            print(rows[-1], file=sys.stderr, flush=True)
            write_result(chosen.to, {**stamp(), "rows": [*map(asdict, rows)]})
    print(f"{sum(row.good for row in rows)} of {len(rows)} good")


if __name__ == "__main__":
    main()

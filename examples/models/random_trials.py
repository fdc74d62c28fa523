"""One random model trained plain and planned side by side: the verdicts, and where the two are apart.

The seed draws the model and the optimizer. A case is one draw of a schedule for it: that of the solvers within a budget
between the smallest that works and the plain peak, or a random one, in which any operator may be recomputed at any
place. The model is captured once for all of its cases.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import memopt
from examples.models.problems import random_schedule
from examples.models.random_habits import hook_parameters
from examples.models.random_modules import Case, random_case
from examples.models.random_reference import Reference, reference, steps_of, twin_of
from examples.models.twins import EXACT, REFUSALS, Run, said, where
from memopt.errors import GIB
from memopt.planning import joined
from memopt.run.plain_calls import NOT_SHOWN
from memopt.solver import Portfolio, RematProblem, Solution, simulate

CASES = 4
"""The number of cases of a seed."""
FORCED = 0.4
"""The share of cases with a random schedule."""
IF_NEEDED = 0.5
"""The share of the cases with a budget at the first call that are planned only where their plain step does not fit. It
does not quite: their budget is just below what it holds."""
JUST_BELOW = 0.99
BUDGETS = (0.0, 0.0, 0.1, 0.3, 0.6, 0.9)
"""Where budgets lie between the smallest that works and the plain peak."""
ROOMY_GB = 1000.0
LOW: dict[str, Any] = {"precision": "bf16", "elsewhere_gb": 0}
"""The options in 16 bits: all levers that are on by default."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class Trial:
    """The result of one case."""

    seed: int
    case: int
    """The number of the case among those of the seed."""
    verdict: str
    """right, rounding ("rounding, named" where the plan names an operator), wrong, over budget, budget refused (none is
    below the smallest that works), refused, error not ours, or plain fails."""
    drawn: str
    """The schedule, the optimizer and the blocks."""
    message: str = ""

    def record(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def trials(
    seed: int, backend: str = "aten", cases: int = CASES, *, low: bool = False, derivatives: bool = False
) -> Iterator[Trial]:
    """Train the model of a seed plain, and planned in several cases, with `low` in 16 bits, or with `derivatives`
    inside of its blocks. Numbers of the backend "inductor" are right to rounding; in 16 bits, the gradients of the
    first step are compared."""
    torch.compiler.reset()
    draw = random.Random(f"trial {seed}")
    optimizer = draw.choice(list(OPTIMIZERS))
    blocks = ""
    try:
        case = random_case(seed, derivatives=derivatives)
        blocks = " ".join(case.blocks)
        plain = reference(case, OPTIMIZERS[optimizer])
    except Exception as error:
        yield from (
            Trial(seed, number, "plain fails", f"{optimizer}: {blocks}", said(error)) for number in range(cases)
        )
        return
    model = _Planned(case, plain, optimizer, backend, low=low)
    for number in range(cases):
        forced, share, ahead = draw.random() < FORCED, draw.choice(BUDGETS), draw.random() < 0.7
        if_needed = not (forced or ahead) and random.Random(f"if needed {seed} {number}").random() < IF_NEEDED
        share = JUST_BELOW if if_needed else share
        schedule = "forced schedule" if forced else f"budget {share}{' of plain' if if_needed else ''}"
        try:
            planning = "if needed" if if_needed else "always"
            with random_schedules(draw) if forced else nullcontext(), patch.dict(os.environ, MEMOPT_PLAN=planning):
                verdict, message = model.train(None if forced else share, ahead=ahead, of_plain=if_needed)
        except memopt.BudgetError as refused:
            verdict, message = "budget refused", said(refused)
        except REFUSALS as refused:
            verdict, message = "refused", said(refused)
        except Exception as error:
            verdict, message = "error not ours", f"{said(error)} | {where(error)}"
        drawn = f"{schedule}{'' if ahead else ' at the first call'}, {optimizer}: {blocks}"
        yield Trial(seed, number, verdict, drawn, message)


class _Planned:
    """The model of a seed, planned again for each case, beside the plain model's numbers."""

    def __init__(self, case: Case, plain: Reference, optimizer: str, backend: str, *, low: bool) -> None:
        self.case, self.plain, self.optimizer = case, plain, OPTIMIZERS[optimizer]
        self.model = copy.deepcopy(case.model)
        hook_parameters(self.model)
        self.low = low
        self.options = (LOW if low else EXACT) | {"backend": backend, "optimizer": self.optimizer}
        self._limits_gb: tuple[float, float] | None = None

    def train(self, share: float | None, *, ahead: bool, of_plain: bool = False) -> tuple[str, str]:
        """Train by a plan from the same state as the plain model: the verdict and where the two are apart. The budget
        is a `share` of the way to the plain peak, or with `of_plain` of what a plain step was measured to hold."""
        self.model.zero_grad()  # a case that failed may have left gradients
        budget_gb = ROOMY_GB if share is None else self._budget_gb(share, of_plain=of_plain)
        self.case.begin_again(self.model)
        self._optimize(budget_gb, ahead=ahead)
        twin = twin_of(self.model, self.case, self.optimizer)
        verdict, message = "right", ""
        for number, run in enumerate(steps_of(twin) if share is None else _unless_refused(steps_of(twin))):
            if self.low:
                verdict, message = (verdict, message) if number else self.plain.judge_low(run)
            elif verdict == "right":  # steps make any rounding before them larger
                notes = _notes(self.model)
                verdict, message = self.plain.judge(run, number, notes, fused=self.options["backend"] == "inductor")
        self.model.zero_grad()  # as may an accumulated step that is refused
        if share is None or verdict == "wrong" or self.case.inputs == "a result":  # which is made outside of the step
            return verdict, message
        measured_gb = twin.measured_bytes() / GIB
        if measured_gb > budget_gb:
            measured_gb = twin.measured_bytes() / GIB  # the first one may hold caches of torch's, too
        if measured_gb > budget_gb:
            return "over budget", f"{measured_gb / budget_gb - 1:.2%} above {budget_gb * 1024:.4f} MB"
        return verdict, message

    def _optimize(self, budget_gb: float, *, ahead: bool) -> None:
        example = self.case.batch if ahead else None
        memopt.optimize(self.model, budget_gb, example_inputs=example, **self.options)

    def _budget_gb(self, share: float, *, of_plain: bool) -> float:
        if self._limits_gb is None:
            self._optimize(ROOMY_GB, ahead=True)
            roomy = memopt.plan_of(self.model)
            self._limits_gb = roomy.smallest_gb(), roomy.plain_peak_gb
        smallest, most = self._limits_gb
        if of_plain:
            return max(smallest, share * self._measured_plain_gb)
        return max(smallest, smallest + share * (most - smallest))

    @cached_property
    def _measured_plain_gb(self) -> float:
        plain = copy.deepcopy(self.case.model)
        hook_parameters(plain)
        twin = twin_of(plain, self.case, self.optimizer)
        for _ in range(2):  # the first step makes the optimiser's state
            measured_gb = twin.measured_bytes() / GIB
        return measured_gb


def _notes(model: nn.Module) -> tuple[str, ...]:
    """The notes of a model's plan; none where its step fits without one, and no plan does."""
    try:
        return memopt.plan_of(model).notes
    except memopt.BudgetError as error:
        if NOT_SHOWN not in error.further:
            raise
        return ()


def _unless_refused(runs: Iterator[Run]) -> Iterator[Run]:
    """The runs; without those after the first where they are refused: gradients that are held need more than the
    smallest budget of a single step."""
    yield next(runs)
    with suppress(memopt.BudgetError):
        yield from runs


@contextmanager
def random_schedules(draw: random.Random) -> Iterator[None]:
    """A block in which planning takes random schedules, whatever they cost."""

    class RandomSchedules(Portfolio):
        def __init__(self, problem: RematProblem, *others: Any) -> None:
            super().__init__(problem, *others)
            self.given = problem

        def solve(self, budget_bytes: int, *args: Any, **options: Any) -> Solution:
            schedule = random_schedule(draw, self.given)
            measured = simulate(self.given, schedule)
            if measured.peak_bytes > budget_bytes:
                return super().solve(budget_bytes, *args, **options)
            return Solution(schedule, measured.peak_bytes, measured.added_seconds, 0.0, "random")

    before = joined.Portfolio
    joined.Portfolio = RandomSchedules  # type: ignore[misc]
    try:
        yield
    finally:
        joined.Portfolio = before  # type: ignore[misc]

"""One random model trained plain and planned side by side: the verdict, and where the two are apart.

The seed draws the model, the budget between the smallest that works and the plain peak, the optimiser, and whether the
schedule is the solvers' or a random one, in which any operator may be recomputed at any place.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import memopt
from examples.models.problems import random_schedule
from examples.models.random_habits import hook_parameters
from examples.models.random_modules import Case, random_case
from examples.models.twins import EXACT, REFUSALS, Run, Twin, difference, said, verdict_of, where
from memopt.errors import GIB
from memopt.planning import captured
from memopt.solver import Portfolio, RematProblem, Solution, simulate

BUDGETS = (0.0, 0.0, 0.1, 0.3, 0.6, 0.9)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
    "RMSprop": torch.optim.RMSprop,
}


@dataclass(frozen=True)
class Trial:
    """The result of one seed."""

    seed: int
    verdict: str
    """right, rounding, wrong, over budget, refused, error not ours, or plain fails."""
    drawn: str
    """The budget's place, the optimiser and the blocks."""
    message: str = ""

    def record(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def trial(seed: int, backend: str = "aten") -> Trial:
    """Train the model of a seed plain and planned. Numbers of the backend "inductor" are right to rounding."""
    torch.compiler.reset()
    draw = random.Random(f"trial {seed}")
    share, optimizer, forced = draw.choice(BUDGETS), draw.choice(list(OPTIMIZERS)), draw.random() < 0.4
    drawn = f"{'forced schedule' if forced else f'budget {share}'}, {optimizer}"
    try:
        case = random_case(seed)
        drawn = f"{drawn}: {' '.join(case.blocks)}"
        plain = _steps(case, copy.deepcopy(case.model), optimizer)
    except Exception as error:
        return Trial(seed, "plain fails", drawn, said(error))
    if difference(plain.run, _steps(case, copy.deepcopy(case.model), optimizer).run)[0]:
        return Trial(seed, "plain fails", drawn, "the plain model gives other numbers each time")
    options = EXACT | {"backend": backend, "optimizer": OPTIMIZERS[optimizer]}
    try:
        with random_schedules(draw) if forced else nullcontext():
            verdict, message = _planned(case, plain, optimizer, None if forced else share, options)
    except REFUSALS as refused:
        verdict, message = "refused", said(refused)
    except Exception as error:
        verdict, message = "error not ours", f"{said(error)} | {where(error)}"
    return Trial(seed, verdict, drawn, message)


def _steps(case: Case, model: nn.Module, optimizer: str) -> Twin:
    hook_parameters(model)
    twin = Twin(model, case.batch)
    twin.optimizer = OPTIMIZERS[optimizer](model.parameters())
    twin.step("step 1")
    twin.step("step 2")
    return twin


def _planned(case: Case, plain: Twin, optimizer: str, share: float | None, options: dict[str, Any]) -> tuple[str, str]:
    budget_gb = 1000.0
    if share is not None:
        roomy = memopt.plan(copy.deepcopy(case.model), budget_gb, case.batch, **options)
        smallest, most = roomy.smallest_gb(), roomy.plain_peak_gb
        budget_gb = max(smallest, smallest + share * (most - smallest))
    ours = copy.deepcopy(case.model)
    memopt.optimize(ours, budget_gb, example_inputs=case.batch, **options)
    twin = _steps(case, ours, optimizer)
    verdict, message = judged(twin.run, plain.run)
    if verdict != "wrong" and share is not None:
        twin.measured_bytes()  # the first one holds caches of torch's, too
        measured = twin.measured_bytes() / GIB
        if measured > budget_gb:
            return "over budget", f"{measured / budget_gb - 1:.2%} above {budget_gb * 1024:.4f} MB"
    if verdict != "wrong":
        plain.run, twin.run = Run([], {}, []), Run([], {}, [])
        if share is not None:
            plain.measured_bytes()
            plain.measured_bytes()
        plain.step("accumulated", 2)
        try:
            twin.step("accumulated", 2)
        except memopt.BudgetError:  # gradients held need more than the plain step's smallest budget
            return verdict, message
        again, at = judged(twin.run, plain.run)
        if again == "wrong":
            return again, at
    return verdict, message


def judged(ours: Run, plain: Run) -> tuple[str, str]:
    """The verdict on the numbers, and where they are farthest apart."""
    apart, at = difference(ours, plain)
    return verdict_of(apart), f"{apart:.1e} apart: {at}" if apart else ""


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

    before = captured.Portfolio
    captured.Portfolio = RandomSchedules  # type: ignore[misc]
    try:
        yield
    finally:
        captured.Portfolio = before  # type: ignore[misc]

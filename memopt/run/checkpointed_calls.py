"""Training calls that run in eager mode with activation checkpoints: where no plan of their regions fits, and while a
plan for their sizes takes longer to make than it would save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

from torch import nn

from memopt.capture.inputs import Call
from memopt.compat.modules import Parts
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.checkpoints import choices
from memopt.run.entry import Entry
from memopt.run.ledger import Moment
from memopt.run.plain_calls import CountedStep, PlainCalls

_WORTH_NAMING = 2
"""A call that is in no graph is counted for a refusal up to this many times its budget: it runs for that."""
_STEPS_OF_A_COUNT = 8
"""To find a choice that fits takes up to as many steps."""
_LOST = 1 / 3
"""The part of a step that runs a second time, where that is longer than the forward took to call: a device may still
compute when it returns."""

Choice: TypeAlias = tuple[PlainCalls, CountedStep]


class CheckpointedCalls:
    """Runs calls as the plain model does, but for modules that are activation checkpoints: of several choices of these
    the fastest whose step fits the budget.

    What code between the regions of a broken forward holds is in no graph, so that no plan can free it; here the code
    itself runs a second time. A forward in one region runs so where it has to be recorded again for smaller sizes,
    until calls have lost as much time to that as a plan takes.
    """

    def __init__(
        self, model: nn.Module, planner: CallPlanner, loss_fn: Callable[..., Any] | None, entry: Entry
    ) -> None:
        self.model, self.planner, self.loss_fn, self.entry = model, planner, loss_fn, entry
        self.serve = False
        """Whether a call for which no plan fits has run so: then further ones are tried so before they are planned."""
        self._lost_seconds = 0.0
        """The time that calls have lost which ran so instead of by a plan."""

    @cached_property
    def _calls(self) -> tuple[PlainCalls, ...]:
        """One for each choice of modules."""
        found = choices(self.model) if "recompute" in self.planner.terms.options.allow else ()
        return tuple(PlainCalls(self.model, self.planner, self.loss_fn, self.entry, one) for one in found)

    def fitting(self, call: Call, situation: Situation, moment: Moment, parts: Parts) -> Choice | None:
        """The choice by which a call fits the budget that cannot be planned, and its step; None where there is none."""
        found = self._first_that_fits(call, situation, moment, parts)
        self.serve |= found is not None
        return found

    def instead_of_planning(
        self, call: Call, situation: Situation, moment: Moment, parts: Parts, plan: Plan, planning_seconds: float
    ) -> Choice | None:
        """As `fitting`, for a call that could be planned, as a larger one was by `plan`; None once calls have lost
        about `planning_seconds` so."""
        step_seconds = plan.step_seconds + plan.added_seconds
        if self._lost_seconds + _STEPS_OF_A_COUNT * step_seconds > planning_seconds:
            self._lost_seconds = 0.0  # by sizes that are planned now
            return None
        started = time.perf_counter()
        try:
            return self._first_that_fits(call, situation, moment, parts)
        finally:
            self._lost_seconds += time.perf_counter() - started

    def run(self, choice: Choice, call: Call, situation: Situation, moment: Moment, plan: Plan | None) -> Any:
        """Run a call by a choice by which it fits, instead of by a plan like that of a larger call if there is one."""
        calls, fits = choice
        started = time.perf_counter()
        result = calls.run(call, fits, situation, moment)
        if plan is not None:
            self._lost_seconds += max(time.perf_counter() - started, _LOST * plan.step_seconds)
        return result

    def _first_that_fits(self, call: Call, situation: Situation, moment: Moment, parts: Parts) -> Choice | None:
        for now in dict.fromkeys((moment, replace(moment, closely=True))):
            for calls in self._calls:
                fits = calls.step_if_it_fits(call, situation, now, parts, plans_serve_all=False)
                if fits is not None:
                    return calls, fits
        return None

    def forget(self) -> None:
        """Have modules chosen, and calls counted, again."""
        vars(self).pop("_calls", None)

    def explain(
        self,
        refused: BudgetError | CaptureError,
        broken: str | None,
        call: Call,
        situation: Situation,
        moment: Moment,
    ) -> BudgetError | CaptureError:
        """The refusal of a call, with the smallest budget by which it runs so, where there is none by a plan or that is
        larger; and with the reason `broken` why it breaks into regions, if it does."""
        if isinstance(refused, CaptureError):
            budget = self.planner.terms.options.budget_bytes
            least = self._least(call, situation, moment, _WORTH_NAMING * budget)
            if least is None:
                return refused
            return BudgetError(budget, least, "modules that run as activation checkpoints", further=(str(refused),))
        if broken is None:
            return refused
        least = self._least(call, situation, moment, refused.smallest_bytes) or refused.smallest_bytes
        further = [f"no plan frees what code between the regions of its forward holds, which breaks: {broken}"]
        if least < refused.smallest_bytes:
            further.append("with the smallest budget its modules run as activation checkpoints")
        return refused.adding(*further, smallest_bytes=least)

    def _least(self, call: Call, situation: Situation, moment: Moment, most_bytes: int) -> int | None:
        """The smallest budget in bytes by which a call runs with checkpoints; None where it is above `most_bytes`."""
        least: int | None = None
        for calls in self._calls:
            least = calls.needed_bytes(call, situation, moment, least or most_bytes) or least
        return least

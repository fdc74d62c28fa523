"""Training calls that run in eager mode with activation checkpoints: where no plan of their regions fits, and while a
plan for their sizes takes longer to make than it would save."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any, TypeAlias

from memopt.errors import BudgetError, CaptureError
from memopt.planning.plan import Plan
from memopt.run.call_in_progress import CallInProgress
from memopt.run.checkpoints import choices
from memopt.run.ledger import Ledger
from memopt.run.plain_calls import PlainCalls
from memopt.run.plain_counter import CountedStep

_WORTH_NAMING = 2
"""For a call that cannot be captured, the largest budget that a refusal looks for and names, as a multiple of the given
one: the search for it runs the call."""
_STEPS_OF_A_COUNT = 8
"""Finding a choice that fits takes up to the time of this many steps."""
_LOST = 1 / 3
"""The part of a step that a call with checkpoints is assumed to lose at least: the time until its forward returns says
little, as the device may still compute."""

Choice: TypeAlias = tuple[PlainCalls, CountedStep]


class CheckpointedCalls:
    """Runs calls as the plain model does, with some modules as activation checkpoints: of several choices of modules,
    the fastest whose step fits the budget.

    No plan can free tensors that eager code between regions holds, as they are in no graph; a checkpoint runs that code
    a second time. A forward in one region runs with checkpoints, too, where it would have to be captured again for
    smaller sizes, until recomputation by checkpoints has taken as much time as making a plan would. `plain` counts
    and runs the same calls without checkpoints."""

    def __init__(self, plain: PlainCalls) -> None:
        self.plain, self.planner, self.entry = plain, plain.planner, plain.entry
        self.serve = False
        """Whether checkpoints have fitted for a call that cannot be planned: later calls then try them before
        planning."""
        self._lost_seconds = 0.0
        """The time that calls have lost by running with checkpoints instead of by a plan."""

    @cached_property
    def _calls(self) -> tuple[PlainCalls, ...]:
        """A `PlainCalls` for each choice of modules, which counts and runs calls with these as checkpoints; empty
        unless `allow` has "recompute"."""
        found = choices(self.entry.model) if "recompute" in self.planner.terms.options.allow else ()
        return tuple(PlainCalls(self.planner, self.entry, one) for one in found)

    def fitting(self, now: CallInProgress) -> Choice | None:
        """The fastest choice of checkpoints with which a call that cannot be planned fits the budget, and the bytes of
        its step; None where no choice fits. A choice that leaves no room for other values of the same sizes is the
        last resort, as each call is then counted anew."""
        found = self._first_that_fits(now)
        if found is None:
            counted = ((calls, calls.fitting_by_its_values(now.closely)) for calls in self._calls)
            found = next(((calls, fits) for calls, fits in counted if fits is not None), None)
        self.serve |= found is not None
        return found

    def beyond(self, now: CallInProgress) -> Choice | None:
        """How a refused call runs if it goes on beyond its budget (`Ledger.goes_on`): with the choice of checkpoints
        that holds least among those whose step can be counted, else without checkpoints. None if the call does not go
        on, or if its plain step cannot be counted either."""
        every = self.plain, *self._calls
        if Ledger.of(self.entry).goes_on(self.entry):
            for calls in reversed(every):
                if (fits := calls.beyond(now)) is not None:
                    return calls, fits
        return None

    def instead_of_planning(self, now: CallInProgress, plan: Plan, planning_seconds: float) -> Choice | None:
        """The fastest choice of checkpoints with which a call that could be planned fits the budget, and the bytes of
        its step. None where no choice fits, or if calls have lost about `planning_seconds`, the time that making a plan
        takes, by running with checkpoints. `plan` is the plan of a larger call."""
        step_seconds = plan.step_seconds + plan.added_seconds
        if self._lost_seconds + _STEPS_OF_A_COUNT * step_seconds > planning_seconds:
            self._lost_seconds = 0.0  # the sizes that lost it are planned from now on
            return None
        started = time.perf_counter()
        try:
            return self._first_that_fits(now)
        finally:
            self._lost_seconds += time.perf_counter() - started

    def run(self, choice: Choice, now: CallInProgress, plan: Plan | None) -> Any:
        """Run a call with a choice of checkpoints that fits, and return what the model returns. `plan` is the plan of a
        larger call if this call could be planned, else None. If it is given, an estimate of the time that the
        checkpoints cost is added to what `instead_of_planning` counts as lost."""
        calls, fits = choice
        started = time.perf_counter()
        result = calls.run(now, fits)
        if plan is not None:
            self._lost_seconds += max(time.perf_counter() - started, _LOST * plan.step_seconds)
        return result

    def _first_that_fits(self, now: CallInProgress) -> Choice | None:
        for attempt in (now,) if now.moment.closely else (now, now.closely):
            for calls in self._calls:
                if (fits := calls.step_if_it_fits(attempt)) is not None:
                    return calls, fits
        return None

    def forget(self) -> None:
        """Drop the choices of checkpoints and the counted bytes of calls, so that both are made again."""
        vars(self).pop("_calls", None)

    def explain(
        self, refused: BudgetError | CaptureError, broken: str | None, now: CallInProgress
    ) -> BudgetError | CaptureError:
        """`refused` with the smallest budget in which the call runs with checkpoints, if no plan of the call can be
        made or every plan needs a larger budget. `broken` is the reason why the forward breaks into regions; if it is
        None, a `BudgetError` is returned unchanged."""
        if isinstance(refused, CaptureError):
            budget = self.entry.budget_bytes
            least = self._least(now, _WORTH_NAMING * budget)
            if least is None:
                return refused
            runs = "modules that run as activation checkpoints"
            least += self.entry.notable_bytes
            return BudgetError(budget, least, runs, least=False, further=(str(refused),))
        if broken is None:
            return refused
        least = self._least(now, refused.smallest_bytes) or refused.smallest_bytes
        further = [
            "the forward breaks into regions, and no plan can free what eager code between them holds; the reason for "
            f"the break: {broken}"
        ]
        if least < refused.smallest_bytes:
            further.append("with the budget that works, modules of the model run as activation checkpoints")
        return refused.adding(*further, smallest_bytes=least)

    def _least(self, now: CallInProgress, most_bytes: int) -> int | None:
        """The smallest budget in bytes in which a call runs with checkpoints; None where it is above `most_bytes`. It
        has room for other values of the same sizes, up to what the plain step takes with these."""
        least: int | None = None
        for calls in self._calls:
            least = calls.needed_bytes(now, least or most_bytes) or least
        if self._calls:
            least = self.plain.needed_bytes(now, least or most_bytes, other_values=False) or least
        return least

"""Searches for the largest batch, or the longest sequence, that fits a budget, by planning only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memopt.errors import BudgetError, CaptureError
from memopt.planning.bracket import Bracket
from memopt.progress import stage
from memopt.units import size as in_words

# Where this many steps fit, memory is taken not to depend on the size.
_ENDLESS = 2**24
# The numbers of steps that are tried first: one sample alone is often traced as a special case.
_FIRST, _FIRST_ESTIMATES = (1, 2), (2, 16)


class PlannedSize(Protocol):
    """The attributes of a plan that the search for the largest size reads; `memopt.Plan` has them."""

    @property
    def added_time(self) -> float:
        """Added time as a fraction of the plain step's."""

    def smallest_bytes(self) -> int:
        """The smallest budget in bytes that works for the size."""


@dataclass
class LargestSize:
    """Searches for the largest multiple of `step`, up to `at_most`, whose plan fits and adds at most `added_time`.

    `plan(size)` raises `BudgetError` for a size that does not fit. All sizes below one that fits are taken to fit too.
    A plan takes many times as long as `estimate`, so that sizes are looked for by estimates first, and planned only
    around the one that the estimates lead to; a wrong estimate costs time and changes no result.
    """

    plan: Callable[[int], PlannedSize]
    budget_bytes: int
    step: int = 1
    at_most: int | None = None
    added_time: float = math.inf
    """The limit, as a fraction of the plain step's time."""
    estimate: Callable[[int], int] | None = None
    """Returns about the smallest budget in bytes that works for a size; None to plan every size that is tried."""
    _tell: Callable[[str], None] = field(default=lambda detail: None, init=False, repr=False)

    def find(self) -> int:
        """The largest size. Raises `BudgetError` if the smallest does not fit, `ValueError` if no size is too large."""
        most = _ENDLESS if self.at_most is None else self.at_most // self.step
        if most < 1:
            raise ValueError(f"at_most must be at least {self.step}, the smallest size to try, not {self.at_most}")
        with stage("looking for the largest size") as self._tell:
            estimates = self._estimates(most)
            near = estimates.fits
            search = Bracket(self.budget_bytes, most, (near, near + 1) if near else _FIRST, needs=dict(estimates.needs))
            while (number := search.next()) is not None:
                self._tell(f"planning {number * self.step} ({self._within(search)})")
                self._plan(number, search)
        if search.fits == _ENDLESS:
            raise ValueError(
                "every size fits: either the inputs from make_inputs do not grow with the size, or the search needs a "
                "limit; give at_most="
            )
        return search.fits * self.step

    def _estimates(self, most: int) -> Bracket:
        """A search by estimates, which has come to its end, or to a size that cannot be captured."""
        search = Bracket(self.budget_bytes, most, _FIRST_ESTIMATES)
        while self.estimate is not None and (number := search.next()) is not None:
            self._tell(f"estimating {number * self.step} ({self._within(search)})")
            try:
                needed = self.estimate(number * self.step)
            except CaptureError:  # as a plan of that size will say, if it is needed
                break
            search.note(number, needed, fits=needed <= self.budget_bytes)
        return search

    def _within(self, search: Bracket) -> str:
        """The limits between which the search goes on, in words."""
        known = [f"{search.fits * self.step} fits" if search.fits else f"of {in_words(self.budget_bytes)}"]
        return ", ".join(known + [f"{search.refused * self.step} does not"] * search.is_closed)

    def _plan(self, number: int, search: Bracket) -> None:
        """Plan a number of steps and put the result into the search. Raises the errors of `find` for one step."""
        try:
            plan = self.plan(number * self.step)
        except BudgetError as error:
            if number == 1:
                raise
            search.note(number, error.smallest_bytes, fits=False)
            return
        fast = plan.added_time <= self.added_time
        search.note(number, plan.smallest_bytes(), fits=fast)
        if not fast and number == 1:
            raise ValueError(
                f"a size of {self.step} fits only with {plan.added_time:.0%} of added time, more than "
                f"max_added_time={self.added_time:g}; raise max_added_time, or the budget"
            )

"""Searches for the largest batch, or the longest sequence, that fits a budget, by planning only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from memopt.errors import BudgetError
from memopt.progress import stage

# Where this many steps fit, memory is taken not to depend on the size.
_ENDLESS = 2**24
# A size is at most this many times the largest size known to fit.
_GROWTH = 8


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
    To plan few sizes, the next one tried is where a straight line through two known smallest budgets, the two nearest
    to the budget, meets it.
    """

    plan: Callable[[int], PlannedSize]
    budget_bytes: int
    step: int = 1
    at_most: int | None = None
    added_time: float = math.inf
    """The limit, as a fraction of the plain step's time."""
    smallest_bytes: dict[int, int] = field(default_factory=dict)
    """Number of steps → the smallest budget that works for it, of each size that was planned."""
    _too_slow: bool = False
    """Whether a size was refused for its added time, which the smallest budgets cannot predict."""

    def find(self) -> int:
        """The largest size. Raises `BudgetError` if the smallest does not fit, `ValueError` if no size is too large."""
        most = _ENDLESS if self.at_most is None else self.at_most // self.step
        if most < 1:
            raise ValueError(f"at_most must be at least {self.step}, the smallest size to try, not {self.at_most}")
        with stage("looking for the largest size") as tell:
            fits, refused = 0, most + 1
            while refused - fits > 1:
                number = self._next(fits, refused)
                tell(f"planning for {number * self.step}; {fits * self.step} fit")
                if self._fits(number):
                    fits = number
                else:
                    refused = number
        if fits == _ENDLESS:
            raise ValueError(
                "every size fits: either the inputs from make_inputs do not grow with the size, or the search needs a "
                "limit; give at_most="
            )
        return fits * self.step

    def _fits(self, number: int) -> bool:
        try:
            plan = self.plan(number * self.step)
        except BudgetError as error:
            self.smallest_bytes[number] = error.smallest_bytes
            if number == 1:
                raise
            return False
        self.smallest_bytes[number] = plan.smallest_bytes()
        if plan.added_time <= self.added_time:
            return True
        if number == 1:
            raise ValueError(
                f"a size of {self.step} fits only with {plan.added_time:.0%} of added time, more than "
                f"max_added_time={self.added_time:g}; raise max_added_time, or the budget"
            )
        self._too_slow = True
        return False

    def _next(self, fits: int, refused: int) -> int:
        """The number of steps to plan next, above `fits` and below `refused`: first 1 and 2, then by the line."""
        known = sorted(self.smallest_bytes)
        # Limited growth: make_inputs may allocate real tensors, and a line through small sizes may be too flat.
        most = min(refused - 1, _GROWTH * max(fits, 1))
        if len(known) < 2:
            return min(1 + len(known), most)
        if refused in self.smallest_bytes and (self._too_slow or len(known) % 3 == 0):
            return (fits + refused) // 2  # bisection, where lines predict badly
        low, high = self._nearest(known)
        slope = (self.smallest_bytes[high] - self.smallest_bytes[low]) / (high - low)
        guess = low + int((self.budget_bytes - self.smallest_bytes[low]) / slope) if slope > 0 else most
        return min(max(guess, fits + 1), most)

    def _nearest(self, known: list[int]) -> tuple[int, int]:
        """The two known numbers of steps whose smallest budgets lie nearest to the budget, the smaller one first."""
        one, other = sorted(known, key=lambda number: abs(self.smallest_bytes[number] - self.budget_bytes))[:2]
        return min(one, other), max(one, other)

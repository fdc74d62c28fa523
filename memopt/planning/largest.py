"""The largest batch, or the longest sequence, that fits a budget, found by planning alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from memopt.errors import BudgetError
from memopt.planning.plan import Plan
from memopt.progress import stage

# Beyond so many steps, memory is taken not to depend on the size.
_ENDLESS = 2**24
_GROWTH = 8


@dataclass
class LargestSize:
    """Looks for the largest multiple of `step` whose plan fits, up to `at_most`, and adds no more than `added_time`.

    `plan(size)` raises `BudgetError` where it does not fit. What fits is taken to fit in smaller sizes too. Few sizes
    are planned: the next one tried is where a straight line through the two nearest smallest budgets meets the budget.
    """

    plan: Callable[[int], Plan]
    budget_bytes: int
    step: int = 1
    at_most: int | None = None
    added_time: float = math.inf
    """As a fraction of the plain step's."""
    smallest_bytes: dict[int, int] = field(default_factory=dict)
    """The smallest budget of each number of steps that was planned."""
    _too_slow: bool = False
    """Whether some size was refused for its time, of which the smallest budgets say nothing."""

    def find(self) -> int:
        """The size. Raises `BudgetError` where not even the smallest fits, `ValueError` where none is too large."""
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
                "every size fits, so what make_inputs gives does not depend on it, or give at_most= for the largest one"
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
                f"a size of {self.step} fits with {plan.added_time:.0%} of added time only, more than "
                f"max_added_time={self.added_time:g}; give more of it, or a larger budget"
            )
        self._too_slow = True
        return False

    def _next(self, fits: int, refused: int) -> int:
        """A number of steps between the two, both left out: 1, 2, then by the line, and its neighbours."""
        known = sorted(self.smallest_bytes)
        # No further than this: make_inputs may make real tensors, and a line through small sizes may be too flat.
        most = min(refused - 1, _GROWTH * max(fits, 1))
        if len(known) < 2:
            return min(1 + len(known), most)
        if refused in self.smallest_bytes and (self._too_slow or len(known) % 3 == 0):
            return (fits + refused) // 2  # where lines do not help, this does
        low, high = self._nearest(known)
        slope = (self.smallest_bytes[high] - self.smallest_bytes[low]) / (high - low)
        guess = low + int((self.budget_bytes - self.smallest_bytes[low]) / slope) if slope > 0 else most
        return min(max(guess, fits + 1), most)

    def _nearest(self, known: list[int]) -> tuple[int, int]:
        """The two whose smallest budgets lie nearest to the budget."""
        one, other = sorted(known, key=lambda number: abs(self.smallest_bytes[number] - self.budget_bytes))[:2]
        return min(one, other), max(one, other)

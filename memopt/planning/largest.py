"""Searches for the largest batch, or the longest sequence, that fits a budget, by planning only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memopt.capture.inputs import Call
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.joined import Joined
from memopt.planning.plan import Plan
from memopt.planning.planner import Request, smallest, solve_on_card
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation
from memopt.progress import stage
from memopt.units import size as in_words

# The next number is at most this many times as far from the first one as the largest known to fit.
_GROWTH = 8


@dataclass
class _Bracket:
    """A search over the numbers 1 to `most`, of which those up to the wanted one fit `budget_bytes`.

    To try few numbers, the next one is where a straight line through two known needs meets the budget; once a number is
    known not to fit, every other one bisects the remaining interval."""

    budget_bytes: int
    most: int
    step: int
    """The size that a number stands for, in words, is this many times the number."""
    first: tuple[int, ...]
    """The numbers that are tried first, as long as they lie between what fits and what does not."""
    fits: int = 0
    """The largest number known to fit."""
    refused: int = field(init=False)
    """The smallest number known not to fit; `most` + 1 where none is known."""
    needs: dict[int, int] = field(default_factory=dict)
    """The smallest budget in bytes of each number that was tried, or estimated before the search."""
    _lines_fail: bool = field(default=False, init=False)
    """Whether a number was refused although its need is within the budget, so that lines through needs mislead."""

    def __post_init__(self) -> None:
        self.refused = self.most + 1

    @property
    def is_closed(self) -> bool:
        """Whether a number is known not to fit."""
        return self.refused <= self.most

    @property
    def within(self) -> str:
        """The sizes between which the search goes on, in words."""
        known = [f"{self.fits * self.step} fits" if self.fits else f"of {in_words(self.budget_bytes)}"]
        return ", ".join(known + [f"{self.refused * self.step} does not"] * self.is_closed)

    def note(self, number: int, needed_bytes: int, *, fits: bool) -> None:
        """Record what a number needs, and whether it fits."""
        self.needs[number] = needed_bytes
        self._lines_fail |= not fits and needed_bytes <= self.budget_bytes
        if fits:
            self.fits = number
        else:
            self.refused = number

    def next(self) -> int | None:
        """The number to try next, above `fits` and below `refused`; None where the search is over."""
        if self.refused - self.fits <= 1:
            return None
        for number in self.first:
            if self.fits < number < self.refused:
                return number
        start = self.first[0]
        if not self.fits:  # twice as far below the first number
            return max(1, self.refused - max(start - self.refused, 1))
        # Limited growth: inputs of a size may take memory, and a line through small numbers may be too flat.
        farther = max(self.fits - start, 1)
        most = min(self.refused - 1, self.fits + _GROWTH * farther)
        if self.is_closed and (self._lines_fail or len(self.needs) % 2):
            return (self.fits + self.refused) // 2  # bisection, where lines predict badly
        if len(self.needs) < 2:
            return most
        nearest = sorted(self.needs, key=lambda number: abs(self.needs[number] - self.budget_bytes))
        low, high = (self.fits, self.refused) if self.is_closed else sorted(nearest[:2])
        slope = (self.needs[high] - self.needs[low]) / (high - low)
        guess = low + int((self.budget_bytes - self.needs[low]) / slope) if slope > 0 else self.fits
        if guess <= self.fits:  # the line leads to a number that fits, or nowhere: twice as far from the first number
            guess = most if not slope else self.fits + (1 if self.is_closed else farther)
        return min(guess, most)


_NEAR = 1.25
"""A lever set is solved for the budget up to this multiple of it: another schedule may fragment less."""


def estimated_bytes(planner: CallPlanner, call: Call) -> int:
    """An estimate of the smallest budget in bytes within which a call can be planned with the allowed levers, without
    those on parameters and the optimizer.

    The estimate is at most the planner's budget if a schedule within that budget is found. Raises `CaptureError` where
    the call cannot be captured on fake tensors or traced."""
    budget_bytes = planner.terms.options.budget_bytes
    found: list[int] = []
    with planner.terms.types(), torch.enable_grad():
        recorded = Recorded(planner, planner.capture_on_fakes(call, None), call, Situation())
        for priced in recorded.from_tightest(planner.terms.lever_sets):
            request = Request(priced.account, budget_bytes, planner.terms.options.effort)
            found.append(_needed_bytes(priced.step.problem, request))
            # On the CPU, a set with fewer levers rarely needs less.
            if not priced.account.caching or not budget_bytes < found[-1] <= _NEAR * budget_bytes:
                break
    return min(found)


def _needed_bytes(joined: Joined, request: Request) -> int:
    """The bytes of the schedule with the smallest peak; at most the budget if any schedule is found within it.

    On a GPU another schedule may need less, as fragmentation differs by a quarter of the step and more."""
    least, budget_bytes = smallest(joined, request.account)[0], request.budget_bytes
    if not request.account.caching or not budget_bytes < least <= _NEAR * budget_bytes:
        return least
    try:
        solve_on_card(joined, request)
    except BudgetError:
        return least
    return budget_bytes


# If this many steps fit, memory is assumed not to depend on the size.
_ENDLESS = 2**24
# The numbers of steps that are tried first: one sample alone is often traced as a special case.
_FIRST, _FIRST_ESTIMATES = (1, 2), (2, 16)


def largest_size(
    plan: Callable[[int], Plan],
    budget_bytes: int,
    step: int = 1,
    at_most: int | None = None,
    added_time: float = math.inf,
    estimate: Callable[[int], int] | None = None,
) -> int:
    """The largest multiple of `step`, up to `at_most`, whose plan fits and adds at most `added_time`, as a fraction of
    the time of the step with nothing recomputed.

    `plan(size)` raises `BudgetError` for a size that does not fit. If a size fits, all smaller ones are assumed to fit.
    `estimate(size)`, about the smallest budget in bytes that works for it, takes a fraction of a plan's time: the
    search first follows estimates, and plans only sizes near the one that these lead to. A wrong estimate costs time
    and changes no result.

    Raises `BudgetError` if the smallest size does not fit, and `ValueError` if the smallest adds more time than
    allowed, if every size fits and `at_most` is None, or if `at_most` is below `step`."""
    most = _ENDLESS if at_most is None else at_most // step
    if most < 1:
        raise ValueError(f"at_most must be at least {step}, the smallest size to try, not {at_most}")
    with stage("looking for the largest size") as tell:
        search = _Bracket(budget_bytes, most, step, _FIRST_ESTIMATES)
        while estimate is not None and (number := search.next()) is not None:
            tell(f"estimating {number * step} ({search.within})")
            try:
                needed = estimate(number * step)
            except CaptureError:  # planning that size raises it again, if the search comes to it
                break
            search.note(number, needed, fits=needed <= budget_bytes)
        near = search.fits
        search = _Bracket(budget_bytes, most, step, (near, near + 1) if near else _FIRST, needs=dict(search.needs))
        while (number := search.next()) is not None:
            tell(f"planning {number * step} ({search.within})")
            try:
                found = plan(number * step)
            except BudgetError as error:
                if number == 1:
                    raise
                search.note(number, error.smallest_bytes, fits=False)
                continue
            search.note(number, found.smallest_bytes(), fits=found.added_time <= added_time)
            if number == 1 and found.added_time > added_time:
                raise ValueError(
                    f"a size of {step} fits only with {found.added_time:.0%} of added time, more than "
                    f"max_added_time={added_time:g}; raise max_added_time, or the budget"
                )
    if search.fits == _ENDLESS:
        raise ValueError(
            "every size fits: either the inputs from make_inputs do not grow with the size, or the search needs a "
            "limit; give at_most="
        )
    return search.fits * step

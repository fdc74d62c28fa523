"""The plans of one region in one situation, each for sizes up to a ceiling, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memopt.capture.region import Sizes
from memopt.planning.plan import Plan
from memopt.recent import Recent
from memopt.run.road import EmittedCall

_MOST = 6
"""The number of emitted plans that are kept."""
_MOST_WITH_SMALLER = 4
"""Plans for smaller batches are made while there are fewer plans than this, so that they never displace the largest."""
_NEGLIGIBLE = 0.02
"""Added time, as a fraction of the step, below which a plan for smaller batches is not worth its planning."""
_SHRINKS = (0.75, 0.5)
"""Smaller sizes, as fractions of the largest one."""


class PlansBySize:
    """Emitted plans by the largest sizes that each of them is for."""

    def __init__(self) -> None:
        self.planning_seconds = math.inf
        """The time that the latest of the plans took."""
        self._emitted: Recent[Sizes, EmittedCall] = Recent(_MOST)
        self._refused: Recent[Sizes, bool] = Recent(_MOST)
        self._lost_seconds: Recent[Sizes, float] = Recent(_MOST)

    def __contains__(self, ceiling: Sizes) -> bool:
        return ceiling in self._emitted

    def __getitem__(self, ceiling: Sizes) -> EmittedCall:
        return self._emitted[ceiling]

    def add(self, ceiling: Sizes, emitted: EmittedCall, seconds: float) -> None:
        """Keep a plan that took `seconds` to make."""
        self._emitted[ceiling] = emitted
        self.planning_seconds = seconds

    def refuse(self, ceiling: Sizes) -> None:
        """Note that no plan for these sizes fits the budget, so that smaller calls are planned for their own."""
        self._refused[ceiling] = True

    def is_refused(self, ceiling: Sizes) -> bool:
        """Whether no plan for these sizes fits the budget."""
        return ceiling in self._refused

    def covering(self, sizes: Sizes) -> Sizes | None:
        """The ceiling by whose plan a call of these sizes runs; None where the call exceeds all of them.

        It is that of the plan with the least added time, or one that has no plan yet: a smaller ceiling, once the
        calls it covers have lost as much time to the recomputation of larger plans as planning takes.
        """
        plans = {ceiling: emitted.plan for ceiling, emitted in self._emitted.items() if covers(ceiling, sizes)}
        if not plans:
            return None
        best = min(plans, key=lambda ceiling: plans[ceiling].added_time)
        smaller = self._worth_planning(best, sizes, plans)
        return best if smaller is None else smaller

    def _worth_planning(self, best: Sizes, sizes: Sizes, plans: Mapping[Sizes, Plan]) -> Sizes | None:
        plan = plans[best]
        if plan.added_time <= _NEGLIGIBLE or len(self._emitted) >= _MOST_WITH_SMALLER:
            return None
        smaller = _smaller(max(plans, key=math.prod), sizes)
        if covers(smaller, best) or self.is_refused(smaller):
            return None
        lost = plan.added_seconds * math.prod(sizes) / math.prod(best)
        self._lost_seconds[smaller] = lost = lost + (self._lost_seconds.get(smaller) or 0.0)
        return smaller if lost > self.planning_seconds else None


def covers(ceiling: Sizes, sizes: Sizes) -> bool:
    """Whether no size exceeds that of the ceiling."""
    return all(size <= most for size, most in zip(sizes, ceiling, strict=True))


def _smaller(ceiling: Sizes, sizes: Sizes) -> Sizes:
    """The smallest of a few fractions of each of the ceiling's sizes that still covers the sizes."""
    return tuple(
        min([most, *(shrunk for part in _SHRINKS if (shrunk := math.ceil(part * most)) >= size)])
        for size, most in zip(sizes, ceiling, strict=True)
    )

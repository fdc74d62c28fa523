"""A planned training call while its forward runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memopt.capture.inputs import Call
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.run.pending import PendingForward


@dataclass(frozen=True, eq=False)
class UnderWay:
    """A call and the situation that it is made in."""

    call: Call
    situation: Situation
    """Without the forwards that wait for their backward."""
    waiting_bytes: int
    """What those forwards hold."""
    begin_forward: Callable[[Plan, Situation], PendingForward]

    @property
    def crowded(self) -> Situation:
        """The situation with the forwards in waiting."""
        return replace(self.situation, other_forwards=self.waiting_bytes)

    def is_too_tight(self, plan: Plan) -> bool:
        """Whether a plan leaves no room for the forwards in waiting."""
        return plan.ceiling_bytes - plan.account.other_forwards + self.waiting_bytes > plan.budget_bytes

    def begin(self, plan: Plan) -> PendingForward:
        """Account for the forward that begins now, as planned."""
        return self.begin_forward(plan, self.situation)

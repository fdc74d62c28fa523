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
    """A training call that is being run, and its situation."""

    call: Call
    situation: Situation
    """The situation of the call, without the forwards that wait for their backward."""
    waiting_bytes: int
    """The bytes that those forwards hold."""
    begin_forward: Callable[[Plan, Situation], PendingForward]

    @property
    def crowded(self) -> Situation:
        """The situation with the forwards that wait for their backward."""
        return replace(self.situation, other_forwards=self.waiting_bytes)

    def is_too_tight(self, plan: Plan) -> bool:
        """Whether a plan leaves too little room for the forwards that wait for their backward."""
        return plan.ceiling_bytes - plan.account.other_forwards + self.waiting_bytes > plan.budget_bytes

    def begin(self, plan: Plan) -> PendingForward:
        """Register the forward that begins now and runs by the plan."""
        return self.begin_forward(plan, self.situation)

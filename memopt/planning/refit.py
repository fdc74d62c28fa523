"""Sets a plan's peak right once its graphs are lowered, and says what the next plan is to reckon with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from memopt.account.breakdown import ANY_LINK, breakdown
from memopt.errors import BudgetError
from memopt.planning.footprint import Footprint
from memopt.planning.plan import Plan
from memopt.solver import simulate

ROUNDS = 4
"""How often a step is planned and lowered at most: each time is a compilation."""
# Room that is left of the budget is used by another round from this share on, where the plan recomputes so much of the
# step that it could pay.
_ROOM = 0.06
_ADDED = 0.01

Made = TypeVar("Made")


def as_lowered(plan: Plan, footprint: Footprint) -> Plan:
    """The plan of one region with the peak that its lowered graphs have."""
    assert plan.joined is not None
    assert plan.captured is not None
    assert plan.schedule is not None
    problem = plan.joined.problem
    handed_over = footprint.left_bytes + problem.ops[-1].workspace_bytes
    moving = max(footprint.forward_bytes, footprint.backward_bytes, handed_over)
    simulated = simulate(problem, plan.schedule, ANY_LINK).peak_bytes - problem.resident_bytes
    account = replace(plan.account, lowering=moving - simulated)
    seen = plan.captured.joined(accumulating=account.gradients_held, as_seen=True)
    return replace(
        plan,
        account=account,
        planned=breakdown(seen.problem, plan.schedule, account),
        ceiling_bytes=breakdown(problem, plan.schedule, account).peak_bytes,
        held_bytes=footprint.held_bytes,
    )


@dataclass
class Refit(Generic[Made]):
    """Planning and lowering in rounds: tighter where lowering took the peak above the budget, looser where it left
    room and the plan recomputes. `made` of a round is kept with its plan."""

    budget_bytes: int
    lowering_bytes: int = 0
    """What the next plan is to reckon with as added by lowering, or as taken away where it is negative."""
    _fitting: list[tuple[Plan, Made]] = field(default_factory=list)
    _above: list[int] = field(default_factory=list)
    _tried: set[object] = field(default_factory=set)

    def judge(self, plan: Plan, made: Made) -> bool:
        """Take note of a lowered plan; whether another round is worth its while."""
        repeated = plan.regions in self._tried
        self._tried.add(plan.regions)
        room = self.budget_bytes - plan.ceiling_bytes
        if room < 0:
            self._above.append(plan.ceiling_bytes)
            self.lowering_bytes += -room if not repeated else -2 * room
            return True
        self._fitting.append((plan, made))
        self.lowering_bytes -= room
        return room > _ROOM * self.budget_bytes and plan.added_time > _ADDED and not repeated and not self._above

    def best(self) -> tuple[Plan, Made]:
        """The fitting plan that adds the least time. Raises `BudgetError` where none fits."""
        if not self._fitting:
            why = f"what lowering makes of {len(self._above)} plans, each tighter than the one before"
            raise BudgetError(self.budget_bytes, min(self._above), why, least=False)
        return min(self._fitting, key=lambda each: each[0].step_seconds + each[0].added_seconds)

    @property
    def fits(self) -> bool:
        return bool(self._fitting)

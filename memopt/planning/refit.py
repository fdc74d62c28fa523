"""Corrects a plan's peak once its graphs are compiled, and determines the bytes that the next plan must leave for
compilation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from memopt.account.breakdown import ANY_LINK
from memopt.errors import BudgetError
from memopt.planning.figures import recounted
from memopt.planning.on_card import compiled_within
from memopt.planning.plan import Plan
from memopt.solver import simulate
from memopt.solver.problem import BlockCall


@dataclass(frozen=True)
class Footprint:
    """The bytes that compiled code of a region's forward and backward holds, without the region's inputs."""

    forward_bytes: int
    """Peak of the forward."""
    held_bytes: int
    """Bytes that the forward leaves: its outputs, and what the backward reads."""
    backward_bytes: int
    """Peak of the backward, including what the forward left, until its last use."""
    left_bytes: int
    """Bytes that the backward leaves: gradients, the outputs of the forward, and the gradients of those."""
    ways: tuple[tuple[tuple[bool, int, int], ...], ...] = ()
    """The allocator's calls in both, as `BlockCall`s: where the forward's outputs are kept, and where these are dropped
    before the backward, as for `step_ways`; empty on the CPU."""


ROUNDS = 4
"""The maximal number of rounds of planning and compiling a step, each of which costs one compilation; one more is for
the smallest plan, where none of these fits."""
# Another round pays where this share of the budget is unused,
_ROOM = 0.06
# and the plan recomputes more than this share of the step.
_ADDED = 0.01

Made = TypeVar("Made")


def as_compiled(plan: Plan, footprint: Footprint) -> Plan:
    """The plan, of one region, with the peak of its compiled code; on a card also with the allocator's overhead for
    that code."""
    step, schedule = plan.solved
    problem = step.problem.problem
    handed_over = footprint.left_bytes + problem.ops[-1].workspace_bytes
    moving = max(footprint.forward_bytes, footprint.backward_bytes, handed_over)
    simulated = simulate(problem, schedule, ANY_LINK).peak_bytes - problem.resident_bytes
    bare = replace(plan.account, lowering=moving - simulated)
    ways = [[BlockCall(*call) for call in calls] for calls in footprint.ways]
    account = compiled_within(step.problem, schedule, bare, ways, plan.budget_bytes) if ways else bare
    return recounted(plan, account, held_bytes=footprint.held_bytes)


@dataclass
class Refit(Generic[Made]):
    """Alternates planning and compiling until compiled code fits: plans again with fewer bytes where the compiled code
    exceeds the budget, with more where it leaves room and the plan recomputes. Compiled code that fits is stored with
    its plan."""

    budget_bytes: int
    lowering_bytes: int = 0
    """The bytes that the next plan must add to its peak for compilation; negative where compiled code holds less."""
    _fitting: list[tuple[Plan, Made]] = field(default_factory=list)
    _above: list[int] = field(default_factory=list)
    """Peaks of the compiled plans that exceed the budget."""
    _tried: set[object] = field(default_factory=set)
    again: bool = True
    """Whether another round is worthwhile."""
    _took_smallest: bool = False

    def judge(self, plan: Plan, made: Made) -> None:
        """Record a plan whose peak is that of its compiled code `made`, and compute the bytes that the next plan must
        leave free."""
        repeated = plan.regions in self._tried
        self._tried.add(plan.regions)
        room = self.budget_bytes - plan.ceiling_bytes
        if room < 0:
            self._above.append(plan.ceiling_bytes)
            self.lowering_bytes += -room if not repeated else -2 * room
            self.again = True
            return
        self._fitting.append((plan, made))
        self.lowering_bytes -= room
        self.again = room > _ROOM * self.budget_bytes and plan.added_time > _ADDED and not repeated and not self._above

    def take_smallest(self, smallest_bytes: int) -> bool:
        """Make the next round compile the plan with the smallest peak, `smallest_bytes` before compilation. Returns
        False, and changes nothing, where that is above the budget."""
        if smallest_bytes > self.budget_bytes:
            return False
        self._took_smallest, self.lowering_bytes = True, self.budget_bytes - smallest_bytes
        return True

    def best(self) -> tuple[Plan, Made]:
        """The plan with the shortest step whose compiled code fits, and that code. Raises `BudgetError` where none
        fits."""
        if not self._fitting:
            why = f"the compiled code of {len(self._above)} plans, each for fewer bytes than the one before"
            needed = self._above[-1] if self._took_smallest else min(self._above)
            raise BudgetError(self.budget_bytes, needed, why, least=False)
        return min(self._fitting, key=lambda fitting: fitting[0].step_seconds + fitting[0].added_seconds)

    @property
    def fits(self) -> bool:
        """Whether the compiled code of any plan so far fits the budget."""
        return bool(self._fitting)

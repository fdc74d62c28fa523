"""Corrects a plan's peak once its graphs are compiled, and determines the bytes that the next plan must leave for
compilation."""

from __future__ import annotations

import sys
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
    """Bytes that a compiled forward and backward hold beside the region's inputs."""

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
FURTHER_ROUNDS = 2
"""The maximal number of rounds after the smallest plan, for a faster one within the room that its code leaves."""
# Another round pays where this share of the budget is unused,
_ROOM = 0.06
# and the plan recomputes more than this share of the step.
_ADDED = 0.01
# Between a plan whose code fits and one whose code does not, none is looked for within this share of the budget.
_NARROW = 0.01

Made = TypeVar("Made")


def as_compiled(plan: Plan, footprint: Footprint) -> Plan:
    """The plan of one region with the peak of its compiled graphs, and on a card with what the allocator then holds."""
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
    """Rounds of planning and compiling: with fewer bytes after a compilation that exceeds the budget, with more after
    one that leaves room though the plan recomputes. The compiled code of a round is kept with its plan."""

    budget_bytes: int
    lowering_bytes: int = 0
    """The bytes that the next plan must add to its peak for compilation; negative where compiled code holds less."""
    again: bool = True
    """Whether another round is worthwhile."""
    _fitting: list[tuple[Plan, Made]] = field(default_factory=list)
    _above: list[int] = field(default_factory=list)
    """Peaks of the compiled plans that exceed the budget."""
    _too_little: int = -sys.maxsize
    """The most bytes left for compilation by a plan whose compiled code exceeds the budget."""
    _enough: int = sys.maxsize
    """The fewest bytes left by one whose compiled code fits."""
    _took_smallest: bool = False

    def judge(self, planned: Plan, compiled: Plan, made: Made) -> None:
        """Record a round: the step as `planned`, the same with the peak of its `compiled` code, and that code, `made`.

        The next plan leaves for compilation what this code holds beyond its plan; after several rounds that exceed the
        budget each time twice as much more, since a plan for a few bytes less often has the same peak once it is
        compiled. Between a plan that exceeds it and one that fits, it leaves what lies in the middle.
        """
        uncompiled = planned.ceiling_bytes - planned.account.lowering
        left, room = self.budget_bytes - uncompiled, self.budget_bytes - compiled.ceiling_bytes
        self.lowering_bytes = compiled.ceiling_bytes - uncompiled
        if room < 0:
            self.lowering_bytes += -room * (2 ** len(self._above) - 1)
            self._above.append(compiled.ceiling_bytes)
            self._too_little = max(left, self._too_little)
            self.again = True
        else:
            self._fitting.append((compiled, made))
            self._enough = min(left, self._enough)
            self.again = room > _ROOM * self.budget_bytes and compiled.added_time > _ADDED
        if self._above and self._fitting:
            if not self._too_little < self.lowering_bytes < self._enough:
                self.lowering_bytes = (self._too_little + self._enough) // 2
            self.again = self.again and self._enough - self._too_little > _NARROW * self.budget_bytes
        elif self._fitting:
            self.again = self.again and self.lowering_bytes < left

    def take_smallest(self, smallest_bytes: int) -> bool:
        """Have the next round compile the plan with the smallest peak, which is `smallest_bytes` before compilation.
        Returns False, and changes nothing, where that is above the budget."""
        if smallest_bytes > self.budget_bytes:
            return False
        self._took_smallest, self.lowering_bytes = True, self.budget_bytes - smallest_bytes
        return True

    def best(self) -> tuple[Plan, Made]:
        """The fitting plan with the shortest step, and its compiled code. Raises `BudgetError` where none fits."""
        if not self._fitting:
            why = f"the compiled code of {len(self._above)} plans, each for fewer bytes than the one before"
            needed = self._above[-1] if self._took_smallest else min(self._above)
            raise BudgetError(self.budget_bytes, needed, why, least=False)
        return min(self._fitting, key=lambda fitting: fitting[0].step_seconds + fitting[0].added_seconds)

    @property
    def fits(self) -> bool:
        """Whether a compiled plan fits the budget."""
        return bool(self._fitting)

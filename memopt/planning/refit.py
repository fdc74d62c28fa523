"""Corrects a plan's peak once its graphs are compiled, and finds how many bytes the next plan must leave free, since
compiled code holds more than was planned."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from memopt.account.account import ANY_LINK, EAGER
from memopt.errors import BudgetError
from memopt.planning.figures import recounted
from memopt.planning.joined import Joined, compiled_within
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import halves, held_after_forward
from memopt.solver import Schedule, simulate
from memopt.solver.problem import BlockCall
from memopt.solver.simulator import lifetimes


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
    """The allocator's calls in forward and backward, as `BlockCall`s: one sequence for outputs that the caller keeps,
    one for outputs that are dropped before the backward (see `step_ways`); empty on the CPU."""


ROUNDS = 4
"""The most rounds of planning and compiling a step, before one for the smallest plan where none of these fits."""
FURTHER_ROUNDS = 2
"""The maximal number of rounds after the smallest plan, for a faster one within the room that its code leaves."""
# Another round pays where this share of the budget is unused,
_ROOM = 0.06
# and the plan recomputes more than this share of the step.
_ADDED = 0.01
# Between a plan whose code fits and one whose code does not, none is looked for within this share of the budget.
_NARROW = 0.01

Made = TypeVar("Made")


def as_compiled(plan: Plan, footprints: Sequence[Footprint | None]) -> Plan:
    """The plan with the peak of its compiled code, which includes on a card the allocator's overhead. `footprints` are
    by region: None for a region that is not compiled and holds what is planned. At least one region is compiled.

    On a card, the allocator's calls are replayed: for a call in one region those of the compiled code; for several
    regions those of the plan, to which the bytes are added that the compiled code holds beyond the plan."""
    step, schedule = plan.solved
    problem = step.problem.problem
    simulated = simulate(problem, schedule, ANY_LINK)
    only = footprints[0] if len(footprints) == 1 else None
    if only is not None:
        handed_over = only.left_bytes + problem.ops[-1].workspace_bytes
        moving, held_bytes = max(only.forward_bytes, only.backward_bytes, handed_over), only.held_bytes
    else:
        live = (simulated.live_bytes - problem.resident_bytes).tolist()
        moving, left_more = _Regions(step.problem, schedule, live).compiled(footprints)
        held_bytes = held_after_forward(problem, schedule) + left_more
    account = replace(plan.account, lowering=moving - (simulated.peak_bytes - problem.resident_bytes))
    if only is not None and only.ways:
        ways = [[BlockCall(*call) for call in calls] for calls in only.ways]
        account = compiled_within(step.problem, schedule, account, ways, plan.budget_bytes)
    return recounted(plan, account, held_bytes=held_bytes)


class _Regions:
    """Where in a schedule the forward and the backward of each region run, and which bytes are alive then."""

    def __init__(self, joined: Joined, schedule: Schedule, live_bytes: Sequence[int]) -> None:
        self.live = live_bytes
        self.owner = [joined.owner[index][0] for index in schedule.evaluations]
        self.halves = halves(joined, schedule)
        """With the evaluations of eager code beside them."""
        ops, storages = joined.problem.ops, joined.problem.storages
        self.eager = {at for at, index in enumerate(schedule.evaluations) if ops[index].name == EAGER}
        lives = lifetimes(joined.problem, schedule.evaluations, schedule.offloads)
        self.lives = [(storages[storage].bytes, born, dies) for storage, born, dies in lives]

    def compiled(self, footprints: Sequence[Footprint | None]) -> tuple[int, int]:
        """The peak with these compiled regions (None: as planned), and what their forwards leave beyond the plan."""
        left_more = 0  # by the forwards so far, beyond the plan
        peaks = [self.live[-1]]
        for region, footprint in enumerate(footprints):
            forward, backward = self.halves[region]
            if footprint is None:
                peaks += [left_more + self._planned(half) for half in (forward, backward)]
                continue
            peaks.append(left_more + self._beside(region, forward) + footprint.forward_bytes)
            peaks.append(left_more + self._beside(region, backward) + footprint.backward_bytes)
            made = set(forward) - self.eager
            left = sum(nbytes for nbytes, born, dies in self.lives if born in made and max(made) < dies)
            before, left_more = left_more, left_more + footprint.held_bytes - left
            peaks.append(max(before, left_more) + self._planned(self.eager.intersection(forward + backward)))
        return max(peaks), left_more

    def _planned(self, positions: Iterable[int]) -> int:
        """The most planned bytes at these positions; 0 without any."""
        return max((self.live[at] for at in positions), default=0)

    def _beside(self, region: int, positions: Sequence[int]) -> int:
        """The bytes alive when one half of a region begins, of others or of eager code, that it cannot free itself."""
        own = [at for at in positions if at not in self.eager]
        if not own:
            return 0
        first, last = own[0], own[-1]
        return sum(
            nbytes
            for nbytes, born, dies in self.lives
            if born < first <= dies
            and (born in self.eager or (self.owner[born] != region and not (self._is_late(born) and dies <= last)))
        )

    def _is_late(self, position: int) -> bool:
        """Whether an evaluation is part of a backward."""
        forward, _ = self.halves[self.owner[position]]
        return not forward or position > forward[-1]


@dataclass
class Refit(Generic[Made]):
    """Alternates planning and compiling until compiled code fits: plans again for fewer bytes where the compiled code
    exceeds the budget, for more where it leaves room and the plan recomputes. Code that fits is kept with its plan."""

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
    """The fewest bytes left for compilation by a plan whose compiled code fits."""
    _took_smallest: bool = False
    _tried: set[object] = field(default_factory=set)

    def is_new(self, planned: Plan) -> bool:
        """Whether no earlier round compiled a plan with the same schedules, which would give the same code."""
        return planned.regions not in self._tried

    def judge(self, planned: Plan, compiled: Plan, made: Made) -> None:
        """Record a round: its plan (`planned`), the plan with its code's peak (`compiled`), and that code (`made`).

        The next plan leaves free (`lowering_bytes`) what this code holds beyond its plan; from the second round over
        budget on also 1, 3, 7, … times this round's excess, since the code of a slightly smaller plan often has the
        same peak. Between a round that left too few bytes free and one that left enough, it is halfway if need be."""
        self._tried.add(planned.regions)
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
        """Make the next round compile the plan with the smallest peak; False where even that is above the budget."""
        if smallest_bytes > self.budget_bytes:
            return False
        self._took_smallest, self.lowering_bytes = True, self.budget_bytes - smallest_bytes
        return True

    def best(self) -> tuple[Plan, Made]:
        """The fastest plan whose compiled code fits, and that code. Raises `BudgetError` if none fits."""
        if not self._fitting:
            why = f"compiled code, which held more than the budget in all {len(self._above)} plans that were tried"
            needed = self._above[-1] if self._took_smallest else min(self._above)
            raise BudgetError(self.budget_bytes, needed, why, least=False)
        return min(self._fitting, key=lambda fitting: fitting[0].step_seconds + fitting[0].added_seconds)

    @property
    def fits(self) -> bool:
        """Whether the compiled code of any round fits the budget."""
        return bool(self._fitting)

"""Positions of parameter steps within a schedule: right after the operators that a step waits for, or at the end of the
backward.

A step changes its parameter, so nothing may read the parameter afterwards. The problem puts each step after the last
backward operator that reads it; operators that a schedule recomputes may read it later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memopt.account.breakdown import ANY_LINK
from memopt.planning.joined import Joined
from memopt.price.priced_graph import PricedParameterStep
from memopt.solver import Offload, Schedule, Solution, simulate

ROUNDS = 4
"""How often a problem is solved with fewer steps within the backward, before all are left to its end."""


def settled(
    joined: Joined, solve: Callable[[Joined], Solution], most_bytes: int | None = None
) -> tuple[Joined, Solution]:
    """The first solution in which no operator reads a parameter after its step and which holds at most `most_bytes`
    once each step comes right after the operators that it waits for, with its problem: the given one, or one that
    leaves more steps to the end. After `ROUNDS` attempts all steps are left to the end."""
    if not joined.steps:
        return joined, solve(joined)
    assert joined.leaving is not None
    current = joined
    for _ in range(ROUNDS):
        solution = solve(current)
        schedule, late = settle(current, solution.schedule)
        if not late:
            peak = simulate(current.problem, schedule, ANY_LINK).peak_bytes
            if most_bytes is None or peak <= most_bytes:
                return current, replace(solution, schedule=schedule, peak_bytes=peak)
            late = _StepPositions.of(current, solution.schedule).early()
        current = joined.leaving(current.left | late)
    current = joined.leaving(joined.left | {step.number for step in joined.steps.values()})
    return current, solve(current)


def settle(joined: Joined, schedule: Schedule) -> tuple[Schedule, frozenset[int]]:
    """The schedule with each step right after the last evaluation that reads the parameter or its gradient, which is
    where it is emitted; and the numbers of the inputs whose step must be left to the end, because no such position is
    valid. If there are any, the schedule is returned unchanged."""
    positions = _StepPositions.of(joined, schedule)
    late = positions.late()
    if late:
        return schedule, late
    order = positions.order(len(schedule.evaluations))
    evaluations = tuple(schedule.evaluations[position] for position in order)
    if evaluations == schedule.evaluations or not schedule.offloads:
        return replace(schedule, evaluations=evaluations), frozenset()
    # The other evaluations keep their order, so an offload keeps its place relative to them.
    steps = frozenset(positions.at.values())
    old = [position for position in order if position not in steps]
    new = [number for number, position in enumerate(order) if position not in steps]
    moved = Schedule(evaluations, tuple(_remapped(offload, old, new) for offload in schedule.offloads))
    try:
        moved.check(joined.problem)
    except ValueError:  # an offload that began or ended at a step
        return schedule, positions.early()
    return moved, frozenset()


@dataclass(frozen=True)
class _StepPositions:
    """Positions in a schedule, by the operator that is a step."""

    steps: Mapping[int, PricedParameterStep]
    at: dict[int, int]
    """Position of the step itself."""
    last: dict[int, int]
    """Position of the last evaluation that reads the parameter or its gradient."""

    @classmethod
    def of(cls, joined: Joined, schedule: Schedule) -> _StepPositions:
        """The positions of a schedule's steps and of the evaluations that they wait for."""
        at: dict[int, int] = {}
        last: dict[int, int] = {}
        steps_waiting: dict[int, list[int]] = {}
        for op, step in joined.steps.items():
            for reader in step.after:
                steps_waiting.setdefault(reader, []).append(op)
        for position, index in enumerate(schedule.evaluations):
            if index in joined.steps:
                at[index] = position
            for op in steps_waiting.get(index, ()):
                last[op] = position
        return cls(joined.steps, at, last)

    def late(self) -> frozenset[int]:
        """Numbers of the inputs that are read after their step."""
        return frozenset(self.steps[op].number for op, at in self.at.items() if self.last[op] > at)

    def early(self) -> frozenset[int]:
        """Numbers of the inputs whose step could come before evaluations that now precede it."""
        steps = set(self.at.values())
        return frozenset(
            self.steps[op].number
            for op, at in self.at.items()
            if any(position not in steps for position in range(self.last[op] + 1, at))
        )

    def order(self, evaluations: int) -> list[int]:
        """The positions in the order in which each step comes right after the evaluations that it waits for."""
        steps_after: dict[int, list[int]] = {}
        for op in sorted(self.at):
            steps_after.setdefault(self.last[op], []).append(self.at[op])
        steps = frozenset(self.at.values())
        found: list[int] = []
        for position in range(evaluations):
            found += [position] * (position not in steps) + steps_after.get(position, [])
        return found


def _remapped(offload: Offload, old: list[int], new: list[int]) -> Offload:
    """An offload with its positions `old` replaced by `new`; a position in neither list is replaced by that of its
    neighbour."""

    def after(position: int) -> int:
        return new[max(0, bisect_right(old, position) - 1)]

    def before(position: int) -> int:
        return new[min(len(new) - 1, bisect_left(old, position))]

    out_after, freed_before = after(offload.out_after), before(offload.freed_before)
    return Offload(offload.storage, out_after, freed_before, before(offload.fetch_from), before(offload.back_before))

"""Steps of parameters within a schedule: each right behind what it has to wait for, or left to the backward's end.

A parameter changes when it is stepped, so that nothing may read it afterwards. The problem has each step behind the
last op of the backward that does; what a schedule evaluates again may still read it later.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memopt.account.breakdown import ANY_LINK
from memopt.planning.captured import Joined
from memopt.price.priced_graph import PricedParameterStep
from memopt.solver import Offload, Schedule, Solution, simulate

ROUNDS = 4
"""How often a problem is solved with fewer steps within the backward, before all are left to its end."""


def settled(
    joined: Joined, solve: Callable[[Joined], Solution], most_bytes: int | None = None
) -> tuple[Joined, Solution]:
    """The first solution of a problem, or of one with more parameters left to the end, that steps none too early, and
    holds `most_bytes` at most once each step comes right behind what it waits for."""
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
            late = _Places.of(current, solution.schedule).early()
        current = joined.leaving(current.left | late)
    current = joined.leaving(joined.left | {step.number for step in joined.steps.values()})
    return current, solve(current)


def settle(joined: Joined, schedule: Schedule) -> tuple[Schedule, frozenset[int]]:
    """The schedule with each step right behind the last evaluation that reads the parameter or its gradient, which is
    where it is emitted; and the numbers of the inputs for which that cannot be: it reads them after their step. It
    stays as it is where there are any."""
    places = _Places.of(joined, schedule)
    late = places.late()
    if late:
        return schedule, late
    order = places.order(len(schedule.evaluations))
    evaluations = tuple(schedule.evaluations[position] for position in order)
    if evaluations == schedule.evaluations or not schedule.offloads:
        return replace(schedule, evaluations=evaluations), frozenset()
    # Of the other evaluations the order is as before: what comes before or behind one of them still does.
    steps = frozenset(places.at.values())
    old = [position for position in order if position not in steps]
    new = [number for number, position in enumerate(order) if position not in steps]
    moved = Schedule(evaluations, tuple(_remapped(stay, old, new) for stay in schedule.offloads))
    try:
        moved.check(joined.problem)
    except ValueError:  # a stay on the host that began or ended at a step
        return schedule, places.early()
    return moved, frozenset()


@dataclass(frozen=True)
class _Places:
    """Positions in a schedule, by the op that is a step."""

    steps: Mapping[int, PricedParameterStep]
    at: dict[int, int]
    last: dict[int, int]
    """Of the last evaluation that reads the parameter or its gradient."""

    @classmethod
    def of(cls, joined: Joined, schedule: Schedule) -> _Places:
        at: dict[int, int] = {}
        last: dict[int, int] = {}
        waits: dict[int, list[int]] = {}
        for op, step in joined.steps.items():
            for reader in step.after:
                waits.setdefault(reader, []).append(op)
        for position, index in enumerate(schedule.evaluations):
            if index in joined.steps:
                at[index] = position
            for op in waits.get(index, ()):
                last[op] = position
        return cls(joined.steps, at, last)

    def late(self) -> frozenset[int]:
        """Numbers of the inputs that are read after their step."""
        return frozenset(self.steps[op].number for op, at in self.at.items() if self.last[op] > at)

    def early(self) -> frozenset[int]:
        """Numbers of the inputs that could be stepped before other evaluations than now."""
        steps = set(self.at.values())
        return frozenset(
            self.steps[op].number
            for op, at in self.at.items()
            if any(position not in steps for position in range(self.last[op] + 1, at))
        )

    def order(self, evaluations: int) -> list[int]:
        """The positions in the order in which each step comes right behind what it waits for."""
        behind: dict[int, list[int]] = {}
        for op in sorted(self.at):
            behind.setdefault(self.last[op], []).append(self.at[op])
        steps = frozenset(self.at.values())
        found: list[int] = []
        for position in range(evaluations):
            found += [position] * (position not in steps) + behind.get(position, [])
        return found


def _remapped(stay: Offload, old: list[int], new: list[int]) -> Offload:
    """A stay on the host by the positions `new` of what was at `old`; what was at neither goes with its neighbours."""

    def behind(position: int) -> int:
        return new[max(0, bisect_right(old, position) - 1)]

    def before(position: int) -> int:
        return new[min(len(new) - 1, bisect_left(old, position))]

    out_after, freed_before = behind(stay.out_after), before(stay.freed_before)
    return Offload(stay.storage, out_after, freed_before, before(stay.fetch_from), before(stay.back_before))

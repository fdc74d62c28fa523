"""Lower bounds on the added seconds of schedules within a budget, and on the peak of all schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.held import Held
from memopt.solver.hull import between, end_points
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate


@dataclass(frozen=True)
class Floor:
    """A lower bound on the peak of every schedule, which holds because the order of first evaluations is fixed."""

    bytes: int
    op: int
    """The op that sets the bound; -1 for a problem without ops."""


def floor_of(problem: RematProblem) -> Floor:
    """The largest need of one op: storages that it reads and makes, workspace, and bytes held in any case."""
    if not problem.ops:
        return Floor(problem.resident_bytes, -1)
    needs = Held(problem).needs
    op = int(np.argmax(needs))
    return Floor(int(needs[op]), op)


def floor_bytes(problem: RematProblem) -> int:
    """A lower bound in bytes on the peak of every schedule."""
    return floor_of(problem).bytes


class LowerBound:
    """The lower bound on added seconds for one problem; the cuts found for one budget are reused for the next.

    Consider the first evaluation of op o. Every value made before it and read by a later first evaluation is either
    live then or recomputed later. At most `budget − bytes held in any case at o` bytes of them are live, so the seconds
    added after o are at least the height there of the lower hull of (bytes live, seconds recomputed). The bound is the
    largest height over `positions` ops. It counts each recomputation once, so it is weak if a schedule must recompute
    in several levels.
    """

    def __init__(self, problem: RematProblem, positions: int = 16) -> None:
        self._problem = problem
        held = Held(problem)
        self._positions = [_Position(problem, index, held) for index in _crowded_ops(problem, positions)]

    def added_seconds(self, budget_bytes: int) -> float:
        """Seconds that every schedule with a peak of at most `budget_bytes` adds; infinite below the floor."""
        return max((position.added_seconds(budget_bytes) for position in self._positions), default=0.0)


def _crowded_ops(problem: RematProblem, count: int) -> list[int]:
    """For each of `count` equal parts of the step, the op with the most live bytes when everything is saved."""
    if not problem.ops:
        return []
    live = simulate(problem, Schedule.save_all(problem)).live_bytes
    stretches = np.array_split(np.arange(len(problem.ops)), min(count, len(problem.ops)))
    return [int(stretch[np.argmax(live[stretch])]) for stretch in stretches]


class _Position:
    """The hull at the first evaluation of one op, refined only around the bytes that budgets leave there."""

    def __init__(self, problem: RematProblem, index: int, held: Held) -> None:
        self._base_bytes = int(held.needs[index])
        present = held[index].union(problem.ops[index].reads)
        first = min(index, problem.forward_ops)
        made = {storage for op in problem.ops[:first] for storage in op.makes}
        later = {storage for op in problem.ops[index + 1 :] for storage in op.reads}
        self._needed = frozenset(made & later) - present
        self._needed_bytes = sum(problem.storages[storage].bytes for storage in self._needed)
        self._problem = problem
        self._present = present
        self._network: CutNetwork | None = None
        self._brackets: list[tuple[Cut, Cut]] = []

    def added_seconds(self, budget_bytes: int) -> float:
        """Seconds that every schedule within the budget adds after this op; infinite if the op itself does not fit."""
        allowed = budget_bytes - self._base_bytes
        if allowed < 0:
            return float("inf")
        if allowed >= self._needed_bytes:
            return 0.0
        if self._network is None:
            self._network = CutNetwork(self._problem, self._needed, self._present)
        return self._value(self._network, allowed)

    def _value(self, network: CutNetwork, allowed: int) -> float:
        """A lower bound on the hull's height in seconds at `allowed` bytes, from cuts at the slopes around it."""
        left, right = next(
            (bracket for bracket in self._brackets if bracket[0].saved_bytes <= allowed < bracket[1].saved_bytes),
            (None, None),
        )
        if left is None or right is None:
            left, right = end_points(network)
            if allowed >= right.saved_bytes:
                return 0.0
        while allowed >= left.saved_bytes:
            middle = between(network, left, right)
            if middle is None:
                break
            left, right = (left, middle) if allowed < middle.saved_bytes else (middle, right)
        self._brackets.append((left, right))
        return _supported(network, left, right, allowed)


def _supported(network: CutNetwork, left: Cut, right: Cut, allowed: int) -> float:
    """The height at `allowed` bytes of the line that has the slope between two points and that no cut lies below."""
    width = right.saved_bytes - left.saved_bytes
    if allowed < left.saved_bytes:
        price = 1e7 * network.total_seconds / max(network.total_bytes, 1)
    elif width <= 0:
        return 0.0
    else:
        price = (left.recompute_seconds - right.recompute_seconds) / width
    _, value = network.cut_and_bound(price)
    return max(0.0, value - price * allowed)

"""Lower bounds on the added seconds of schedules within a budget, and on the peak of all schedules.

Also `HeldBytes`: the bytes that every schedule holds at each op's first evaluation, whatever it recomputes.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memopt.solver.arrays import Flags, Ints
from memopt.solver.min_cut import Cut, CutNetwork, between, end_points
from memopt.solver.problem import RematProblem, Schedule
from memopt.solver.simulator import simulate


def movable_storages(problem: RematProblem) -> list[bool]:
    """Per storage: whether it can be freed and recomputed."""
    return [
        op < problem.forward_ops and problem.ops[op].recomputable and not problem.storages[storage].kept
        for storage, op in enumerate(problem.producer)
    ]


class HeldBytes:
    """The storages that every schedule holds at each op's first evaluation, besides those that the op reads and makes.

    They are results of the step that stay to its end, and storages still to be read that cannot be recomputed: those
    made by backward ops and by ops that are not recomputable. `held[i]` is the set at op i."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self.movable: Flags = np.array(movable_storages(problem), np.bool_)
        self._size = np.array([storage.bytes for storage in problem.storages], np.int64)
        self._from = np.array(problem.producer, np.int64) + 1
        last = self._from - 1
        for index, op in enumerate(problem.ops):
            last[list(op.reads)] = index
        last[np.array([storage.kept for storage in problem.storages], np.bool_)] = len(problem.ops)
        self._last = last

    def __getitem__(self, index: int) -> frozenset[int]:
        alive = ~self.movable & (self._from <= index) & (index <= self._last)
        return frozenset(np.flatnonzero(alive).tolist())

    @cached_property
    def bytes(self) -> Ints:
        """Per op, with one more entry for the end of the step: bytes of the held storages."""
        change = np.zeros(len(self._problem.ops) + 2, np.int64)
        fixed = ~self.movable & (self._from <= self._last)
        np.add.at(change, self._from[fixed], self._size[fixed])
        np.add.at(change, np.minimum(self._last[fixed], len(self._problem.ops)) + 1, -self._size[fixed])
        return np.cumsum(change[:-1])

    @cached_property
    def own_bytes(self) -> Ints:
        """Per op, the sum of the bytes of held storages, of the op's workspace, and of those storages it makes that no
        schedule can recompute or offload (not `movable`)."""
        beside = [
            op.workspace_bytes + sum(int(self._size[s]) for s in op.makes if not self.movable[s])
            for op in self._problem.ops
        ]
        return self.bytes[:-1] + np.array(beside, np.int64)

    @cached_property
    def needs(self) -> Ints:
        """Per op: a lower bound on the live bytes at its first evaluation, resident bytes included."""
        moved = [sum(int(self._size[s]) for s in {*op.reads, *op.makes} if self.movable[s]) for op in self._problem.ops]
        return self._problem.resident_bytes + self.own_bytes + np.array(moved, np.int64)


def floor_of(problem: RematProblem) -> tuple[int, int]:
    """A lower bound in bytes on the peak of every schedule, which holds because the order of first evaluations is
    fixed; and the op that sets it, or -1 for a problem without ops. It is the largest need of any single op: bytes of
    the storages that it reads and makes, its workspace, and bytes held in any case."""
    if not problem.ops:
        return problem.resident_bytes, -1
    needs = HeldBytes(problem).needs
    op = int(np.argmax(needs))
    return int(needs[op]), op


def floor_bytes(problem: RematProblem) -> int:
    """A lower bound in bytes on the peak of every schedule."""
    return floor_of(problem)[0]


class LowerBound:
    """The lower bound on added seconds for one problem; the cuts found for one budget are reused for the next.

    Consider the first evaluation of op o. Every value made before it and read by a later first evaluation is either
    live then or recomputed later: each choice of the live ones is a point (bytes live, seconds recomputed). At most
    `budget − bytes held in any case at o` bytes of them are live, so the seconds added after o are at least the height,
    at these bytes, of the lower convex hull of the points. The bound is the largest height over `positions` ops. It
    counts each recomputation once, so it is weak if a schedule must recompute in several levels.
    """

    def __init__(self, problem: RematProblem, positions: int = 16) -> None:
        self._problem = problem
        held = HeldBytes(problem)
        self._positions = [Position(problem, index, held) for index in _crowded_ops(problem, positions)]

    def added_seconds(self, budget_bytes: int) -> float:
        """A lower bound on the seconds that schedules within the budget add; infinite below the floor."""
        return max((position.added_seconds(budget_bytes) for position in self._positions), default=0.0)


def _crowded_ops(problem: RematProblem, count: int) -> list[int]:
    """For each of `count` equal parts of the step, the op with the most live bytes when everything is saved."""
    if not problem.ops:
        return []
    live = simulate(problem, Schedule.save_all(problem)).live_bytes
    stretches = np.array_split(np.arange(len(problem.ops)), min(count, len(problem.ops)))
    return [int(stretch[np.argmax(live[stretch])]) for stretch in stretches]


class Position:
    """The lower convex hull of bytes live and seconds recomputed (see `LowerBound`) at op `index`'s first evaluation.

    Its vertices are computed only near the bytes that are asked for."""

    def __init__(self, problem: RematProblem, index: int, held: HeldBytes) -> None:
        self.base_bytes = int(held.needs[index])
        self.present = held[index].union(problem.ops[index].reads)
        first = min(index, problem.forward_ops)
        made = {storage for op in problem.ops[:first] for storage in op.makes}
        later = {storage for op in problem.ops[index + 1 :] for storage in op.reads}
        self.needed = frozenset(made & later) - self.present
        self.needed_bytes = sum(problem.storages[storage].bytes for storage in self.needed)
        self.problem = problem
        self.network: CutNetwork | None = None
        self._brackets: list[tuple[Cut, Cut]] = []

    def added_seconds(self, budget_bytes: int) -> float:
        """A lower bound on the seconds added after this op; infinite if the op itself does not fit the budget."""
        allowed = budget_bytes - self.base_bytes
        if allowed < 0:
            return float("inf")
        if allowed >= self.needed_bytes:
            return 0.0
        if self.network is None:
            self.network = CutNetwork(self.problem, self.needed, self.present)
        return self._value(self.network, allowed)

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
    """The height in seconds, at `allowed` bytes, of a line that no cut lies below.

    Its slope is that between `left` and `right`, or steep where `allowed` is less than both of them save.
    """
    width = right.saved_bytes - left.saved_bytes
    if allowed < left.saved_bytes:
        price = 1e7 * network.total_seconds / max(network.total_bytes, 1)
    elif width <= 0:
        return 0.0
    else:
        price = (left.recompute_seconds - right.recompute_seconds) / width
    _, value = network.cut_and_bound(price)
    return max(0.0, value - price * allowed)

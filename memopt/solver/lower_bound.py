"""Lower bounds on the added seconds of schedules within a budget, with or without offloads, and on the peak of all
schedules. Also `HeldBytes`: the bytes that every schedule holds at each op's first evaluation, whatever it recomputes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Flags, Ints
from memopt.solver.min_cut import Cut, CutNetwork, between, end_points, slope
from memopt.solver.problem import Link, RematProblem, Schedule
from memopt.solver.simulator import simulate

NO_LINK = Link(0.0)


class HeldBytes:
    """The storages that every schedule holds at each op's first evaluation, besides those that the op reads and makes.

    They are results of the step that stay to its end, and storages still to be read that cannot be recomputed: those
    made by backward ops and by ops that are not recomputable. `held[i]` is the set at op i. With `offloading`, all
    storages but the results may be elsewhere."""

    def __init__(self, problem: RematProblem, offloading: bool = False) -> None:
        self._problem = problem
        kept = np.array([storage.kept for storage in problem.storages], np.bool_)
        again = [op < problem.forward_ops and problem.ops[op].recomputable for op in problem.producer]
        self.movable: Flags = ~kept & (np.array(again, np.bool_) | offloading)
        """Per storage: whether it can be freed and recomputed, or with `offloading` copied back."""
        self._size = np.array([storage.bytes for storage in problem.storages], np.int64)
        self._from = np.array(problem.producer, np.int64) + 1
        last = self._from - 1
        for index, op in enumerate(problem.ops):
            last[list(op.reads)] = index
        last[kept] = len(problem.ops)
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
        """Per op: bytes of held storages, of its workspace, and of those storages it makes that are not `movable`."""
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


def floor_of(problem: RematProblem, offloading: bool = False) -> tuple[int, int]:
    """A lower bound in bytes on the peak of every schedule, or with `offloading` of every one that may also offload;
    and the op that sets it, or -1 for a problem without ops. It is the largest need of any single op: bytes of the
    storages that it reads and makes, its workspace, and bytes held in any case. It holds because the order of first
    evaluations is fixed."""
    if not problem.ops:
        return problem.resident_bytes, -1
    needs = HeldBytes(problem, offloading).needs
    op = int(np.argmax(needs))
    return int(needs[op]), op


def floor_bytes(problem: RematProblem) -> int:
    """A lower bound in bytes on the peak of every schedule without offloads."""
    return floor_of(problem)[0]


_POSITIONS = 16
# The steps of the bisection for the added seconds of the bound on the whole step.
_BISECTIONS = 6


class LowerBound:
    """The lower bound on added seconds for one problem; the cuts found for one budget are reused for the next.

    Consider the first evaluation of op o. Every value made before it and read by a later first evaluation is either
    live then or recomputed later: each choice of the live ones is a point (bytes live, seconds recomputed). At most
    `budget − bytes held in any case at o` bytes of them are live, so the seconds added after o are at least the height,
    at these bytes, of the lower convex hull of the points. The bound is the largest height over `_POSITIONS` ops. It
    counts each recomputation once, so it is weak if a schedule must recompute in several levels.

    Over a link, the bytes on the host at a time t were copied out before t and are copied back after t, through one
    queue each. So they are at most half of the bytes that the link moves in one direction during the whole step. Held
    on the device instead, they make a schedule of the same evaluations without offloads, for a budget that is larger by
    those bytes; the bound without offloads applies to it. The bound is not tight if transfers hide and memory is not
    needed at all times, nor for budgets below the smallest peak of recomputation alone.
    """

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self._held = HeldBytes(problem)
        self._begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
        self._live = simulate(problem, Schedule.save_all(problem)).live_bytes
        parts = np.array_split(np.arange(len(problem.ops)), _POSITIONS)
        self._stretches = [part for part in parts if part.size]
        self._known: dict[int, _Position] = {}

    def added_seconds(self, budget_bytes: int, link: Link = NO_LINK) -> float:
        """A lower bound on the seconds that schedules within the budget add; without offloads, infinite below the
        floor."""
        highest = max((at.added_seconds(budget_bytes, link) for at in self._positions(link)), default=0.0)
        return max(highest, self._in_all(budget_bytes, link)) if link.bytes_per_second else highest

    def _positions(self, link: Link) -> list[_Position]:
        """For each part of the step, the position with the most live bytes that the link cannot have moved."""
        rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else 0.0
        begins = self._begins[:-1]
        crowded = self._live - rate * np.minimum(begins, self._begins[-1] - begins)
        indices = [int(stretch[np.argmax(crowded[stretch])]) for stretch in self._stretches]
        for index in indices:
            if index not in self._known:
                self._known[index] = _Position(self._problem, index, self._held)
        return [self._known[index] for index in indices]

    def _in_all(self, budget_bytes: int, link: Link) -> float:
        """The bound on the whole step: of schedules without offloads at a budget larger by half of the moved bytes.

        A step with A added seconds gives bound(A), which does not increase with A, so min(A, bound(A)) is a bound for
        every A. The best A is found by bisection.
        """

        def bound(added: float) -> float:
            moved = link.bytes_per_second * (self._problem.seconds + added) / 2
            more = moved if link.host_bytes is None else min(moved, link.host_bytes)
            return 0.0 if math.isinf(more) else self.added_seconds(budget_bytes + math.ceil(more))

        low, high = 0.0, bound(0.0)
        if math.isinf(high) and math.isinf(link.bytes_per_second):
            return high
        high = min(high, self._problem.seconds)
        for _ in range(_BISECTIONS if high > 0 else 0):
            middle = (low + high) / 2
            if bound(middle) >= middle:
                low = middle
            else:
                high = middle
        return low


class _Line(NamedTuple):
    """A line below a hull: every cut that holds b bytes recomputes at least `seconds − price · b` seconds."""

    seconds: float
    price: float

    def at(self, held_bytes: float) -> float:
        """The height of the line in seconds."""
        return self.seconds - self.price * held_bytes


class _Position:
    """The bound from the first evaluation of op `index`, by the lower convex hull of bytes live and seconds recomputed
    (see `LowerBound`). The hull's vertices are computed only near the bytes that are asked for."""

    def __init__(self, problem: RematProblem, index: int, held: HeldBytes) -> None:
        self.base_bytes = int(held.needs[index])
        self._present = held[index].union(problem.ops[index].reads)
        first = min(index, problem.forward_ops)
        made = {storage for op in problem.ops[:first] for storage in op.makes}
        later = {storage for op in problem.ops[index + 1 :] for storage in op.reads}
        self._needed = frozenset(made & later) - self._present
        self._needed_bytes = sum(problem.storages[storage].bytes for storage in self._needed)
        self._problem = problem
        self._before = sum(op.seconds for op in problem.ops[:index])
        self._after = problem.seconds - self._before
        self.points: list[Cut] = []
        """The vertices found so far, by rising bytes."""

    def added_seconds(self, budget_bytes: int, link: Link) -> float:
        """A lower bound on the seconds added with at most `budget_bytes` live here; infinite if the op does not fit."""
        free = budget_bytes - self.base_bytes
        least = max(0.0, float(-free))  # at least these bytes must be on the host for the op to fit
        most = math.inf if link.host_bytes is None else float(link.host_bytes)
        if link.bytes_per_second == 0:
            most = 0.0
        if least > most:
            return math.inf
        if most == 0:
            return max(self._line(free).at(free), 0.0)
        if math.isinf(link.bytes_per_second):
            return 0.0 if math.isinf(most) else max(self._line(free + most).at(free + most), 0.0)
        rate = max(link.bytes_per_second, 1e-300)
        in_time = min(self._before, self._after) * rate
        line = self._line(free + min(max(in_time, least), most))

        def total(host: float) -> float:
            """The seconds added if `host` bytes are on the host at this evaluation: waits and recomputation."""
            waits = max(0.0, host / rate - self._before)
            return waits + max(line.at(free + host), host / rate - self._after, 0.0)

        meets = [least, most, self._before * rate, self._after * rate]
        meets.append((line.seconds - line.price * free + self._after) / (line.price + 1 / rate))
        if line.price > 0:
            meets.append(line.seconds / line.price - free)
        return min(total(min(max(host, least), most)) for host in meets if host < math.inf)

    @cached_property
    def _network(self) -> CutNetwork:
        return CutNetwork(self._problem, self._needed, self._present)

    def _line(self, allowed: float) -> _Line:
        """A line below the hull that is as high as the hull at `allowed` bytes."""
        if allowed >= self._needed_bytes:
            return _Line(0.0, 0.0)
        network, points = self._network, self.points
        if not points:
            points += end_points(network)
        while True:
            right = next((i for i, cut in enumerate(points) if cut.saved_bytes > allowed), len(points))
            if right == len(points):
                return _Line(0.0, 0.0)
            middle = between(network, points[right - 1], points[right]) if right else None
            if middle is None:
                break
            points.insert(right, middle)
        steep = 1e7 * network.total_seconds / max(network.total_bytes, 1)  # for less than any cut saves
        price = slope(points[right - 1], points[right]) if right else steep
        return _Line(network.cut(price).bound, price)

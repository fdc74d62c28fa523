"""A lower bound on the added seconds of schedules within a budget that may also offload.

It is the largest of the bounds at 16 positions (`_Position`) and of a bound on the whole step. The bytes on the
host at a time t were copied out before t and are copied back after t, through one queue each. So they are at most half
of the bytes that the link moves in one direction during the whole step. Held on the device instead, they make a
schedule of the same evaluations without offloads, for a budget that is larger by those bytes; a lower bound on such
schedules applies. The bound is not tight if transfers hide and memory is not needed at all times, nor for budgets below
the smallest peak of recomputation alone.

Minimum cuts in which a saved storage may also be offloaded are found by relaxing the link's capacity. Offloading a
storage is priced at the seconds by which its two transfers exceed the time between its last use in the forward and its
first read in the backward, plus μ times the seconds of one transfer, where μ in [0, 1] is the shadow price of a second
of the link. At μ = 0 transfers that hide are free; at μ = 1 the link's time costs as much as compute. A cut uses the
least μ at which the link has time for the offloaded storages (Lagrangian relaxation of its capacity). POFO (Beaumont et
al., 2021) weighs the three choices together as well, by dynamic programming over chains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from memopt.solver.arrays import Floats
from memopt.solver.lower_bound import HeldBytes, LowerBound, Position
from memopt.solver.min_cut import Cut, CutNetwork, between, end_points
from memopt.solver.problem import Link, RematProblem, Schedule
from memopt.solver.simulator import simulate

# The number of prices of a byte that are tried, and steps of the bisection for μ at each.
_PRICES, _PRICE_BISECTIONS = 5, 6


def offload_cuts(
    problem: RematProblem, network: CutNetwork, hull: Sequence[Cut], link: Link, capacity_seconds: float
) -> tuple[Cut, ...]:
    """The cheapest cuts, with offloads, at several prices, in seconds, of a saved byte: these are slopes of `hull`, the
    lower hull of the problem's `network`. The link's time has a price, too: for each cut the least, from 0 to that of
    compute, at which its transfers take at most `capacity_seconds` in either direction."""
    slopes = [
        (left.recompute_seconds - right.recompute_seconds) / (right.saved_bytes - left.saved_bytes)
        for left, right in itertools.pairwise(hull)
    ]
    prices = [slopes[int(place)] for place in np.linspace(0, len(slopes) - 1, min(_PRICES, len(slopes)))]
    seconds = np.array([link.transfer_seconds(storage.bytes) for storage in problem.storages])
    unhidden = np.maximum(0.0, 2 * seconds - _idle_seconds(problem))
    cuts = {}
    for price in prices:
        cut = _within_capacity(network, price, unhidden, seconds, capacity_seconds)
        cuts[cut.saved] = cut
    return tuple(cuts.values())


def _within_capacity(network: CutNetwork, price: float, unhidden: Floats, seconds: Floats, capacity: float) -> Cut:
    """The cut at the least shadow price, or at 1, at which transfers take at most `capacity` seconds each way."""
    cut = network.cut(price, unhidden)
    if _busy(cut, seconds) <= capacity:
        return cut
    low, high = 0.0, 1.0
    cut = network.cut(price, unhidden + seconds)
    for _ in range(_PRICE_BISECTIONS):
        middle = (low + high) / 2
        here = network.cut(price, unhidden + middle * seconds)
        if _busy(here, seconds) <= capacity:
            high, cut = middle, here
        else:
            low = middle
    return cut


def _busy(cut: Cut, seconds: Floats) -> float:
    """Seconds that the cut's offloads keep one direction of the link busy."""
    return float(seconds[sorted(cut.offloaded)].sum())


def _idle_seconds(problem: RematProblem) -> Floats:
    """Per storage: seconds of the plain step from its last use in the forward to its first read in the backward."""
    begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
    last_used, first_read = np.zeros(len(problem.storages)), np.zeros(len(problem.storages))
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        last_used[[*op.reads, *op.makes]] = begins[index + 1]
    for index in reversed(range(problem.forward_ops, len(problem.ops))):
        first_read[list(problem.ops[index].reads)] = begins[index]
    return np.maximum(0.0, first_read - last_used)


# The most vertices added to a hull around the bytes of one query.
_REFINEMENTS = 12


@dataclass(frozen=True)
class _Line:
    """A line below a hull: every cut that holds b bytes recomputes at least `seconds − price · b` seconds."""

    seconds: float
    price: float

    def at(self, held_bytes: float) -> float:
        """The height of the line in seconds."""
        return self.seconds - self.price * held_bytes


class _Position(Position):
    """The bound from the first evaluation of op `index`.

    `seconds_before` and `seconds_after` are the step's seconds, without recomputation, up to that op and from it on.
    """

    def __init__(
        self, problem: RematProblem, index: int, held: HeldBytes, seconds_before: float, seconds_after: float
    ) -> None:
        super().__init__(problem, index, held)
        self._before, self._after = seconds_before, seconds_after
        self._points: list[Cut] = []

    def added_seconds_over(self, budget_bytes: int, link: Link) -> float:
        """A lower bound on the seconds added with at most `budget_bytes` live here; infinite if the op does not fit."""
        free = budget_bytes - self.base_bytes
        least = max(0.0, float(-free))  # at least these bytes must be on the host for the op to fit
        most = math.inf if link.host_bytes is None else float(link.host_bytes)
        if link.bytes_per_second == 0:
            most = 0.0
        if least > most:
            return math.inf
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

    def _line(self, allowed: float) -> _Line:
        """A line below the hull that is almost as high as the hull at `allowed` bytes."""
        if allowed >= self.needed_bytes:
            return _Line(0.0, 0.0)
        if self.network is None:
            self.network = CutNetwork(self.problem, self.needed, self.present)
            self._points = list(end_points(self.network))
        points, network = self._points, self.network
        for _ in range(_REFINEMENTS):
            right = next((i for i, cut in enumerate(points) if cut.saved_bytes > allowed), len(points))
            if right in (0, len(points)):
                break
            middle = between(network, points[right - 1], points[right])
            if middle is None:
                break
            points.insert(right, middle)
        right = next((i for i, cut in enumerate(points) if cut.saved_bytes > allowed), len(points))
        if right == len(points):
            return _Line(0.0, 0.0)
        if right == 0:
            price = 1e7 * network.total_seconds / max(network.total_bytes, 1)
        else:
            lost = points[right - 1].recompute_seconds - points[right].recompute_seconds
            price = lost / (points[right].saved_bytes - points[right - 1].saved_bytes)
        return _Line(network.cut_and_bound(price)[1], price)


_BISECTIONS = 6


def transient_floor(problem: RematProblem) -> tuple[int, int]:
    """The largest need in bytes of one op if all other storages are offloaded, and that op's index (-1 without ops).

    An op needs the storages it reads and makes, its workspace, and the results made so far, which are never offloaded.
    """
    results = 0
    most, at = problem.resident_bytes, -1
    for index, op in enumerate(problem.ops):
        held = sum(problem.storages[s].bytes for s in {*op.reads, *op.makes} if not problem.storages[s].kept)
        results += sum(problem.storages[s].bytes for s in op.makes if problem.storages[s].kept)
        needs = problem.resident_bytes + op.workspace_bytes + held + results
        if needs > most or at < 0:
            most, at = needs, index
    return most, at


class OffloadBound:
    """A lower bound on the seconds that any schedule, with or without offloads, adds, for any budgets and links."""

    def __init__(self, problem: RematProblem, positions: int = 16) -> None:
        self._floor_bytes = transient_floor(problem)[0]
        if problem.home_bytes:  # they may be off the device at any time, so a bound without their bytes holds too
            there = (replace(storage, bytes=0) if storage.home else storage for storage in problem.storages)
            problem = replace(problem, storages=tuple(there))
        self._problem = problem
        self._without = LowerBound(problem)
        self._held = HeldBytes(problem)
        self._begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
        self._live = simulate(problem, Schedule.save_all(problem)).live_bytes
        self._stretches = [part for part in np.array_split(np.arange(len(problem.ops)), positions) if part.size]
        self._known: dict[int, _Position] = {}

    def added_seconds(self, budget_bytes: int, link: Link) -> float:
        """A lower bound on the seconds that schedules within the budget add; infinite below the floor."""
        if budget_bytes < self._floor_bytes:
            return math.inf
        positions = self._positions(link)
        highest = max((position.added_seconds_over(budget_bytes, link) for position in positions), default=0.0)
        return max(highest, self._in_all(budget_bytes, link))

    def _positions(self, link: Link) -> list[_Position]:
        """For each part of the step, the position with the most live bytes that the link cannot have moved."""
        rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else 0.0
        begins = self._begins[:-1]
        crowded = self._live - rate * np.minimum(begins, self._begins[-1] - begins)
        return [self._position(int(stretch[np.argmax(crowded[stretch])])) for stretch in self._stretches]

    def _position(self, index: int) -> _Position:
        """The position of op `index`, cached."""
        if index not in self._known:
            before = float(self._begins[index])
            after = self._problem.seconds - before
            self._known[index] = _Position(self._problem, index, self._held, before, after)
        return self._known[index]

    def _in_all(self, budget_bytes: int, link: Link) -> float:
        """The bound on the whole step: of schedules without offloads at a budget larger by half of the moved bytes.

        A step with A added seconds gives bound(A), which does not increase with A, so min(A, bound(A)) is a bound for
        every A. The best A is found by bisection.
        """

        def bound(added: float) -> float:
            moved = link.bytes_per_second * (self._problem.seconds + added) / 2
            host = math.inf if link.host_bytes is None else link.host_bytes
            more = min(moved, host)
            return 0.0 if math.isinf(more) else self._without.added_seconds(budget_bytes + math.ceil(more))

        low, high = 0.0, bound(0.0)
        if high in (0.0, math.inf) and link.bytes_per_second in (0.0, math.inf):
            return high
        high = min(high, self._problem.seconds)
        for _ in range(_BISECTIONS if high > 0 else 0):
            middle = (low + high) / 2
            if bound(middle) >= middle:
                low = middle
            else:
                high = middle
        return low

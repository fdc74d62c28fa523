"""A lower bound, from one position of the step, on the added seconds of schedules that may also offload.

A moment is the first evaluation of an op o. Let H be the bytes that are on the host at that moment and are copied back
later. Held on the device instead, they make a schedule without offloads that holds at most budget + H bytes at o. So
the recomputations from o on take at least h(budget + H) seconds, where h is the hull of (bytes live at o, seconds
recomputed after it) of `lower_bound`. These bytes are copied out before o and back after it, through one queue each:

    H ≤ bandwidth · (seconds of the ops before o + seconds added before)
    H ≤ bandwidth · (seconds of o and the ops after it + seconds added after)

So the added seconds are at least the minimum over H of

    max(0, H / bandwidth − before) + max(h(budget + H), H / bandwidth − after)

With h replaced by a line below it, this function is convex and piecewise linear, so its minimum lies where two of its
pieces meet. Latency is left out, which only lowers the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.solver.hull import between, end_points
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.problem import Link, RematProblem

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


class Moment:
    """The bound from the first evaluation of op `index`.

    `held` are the storages that every schedule holds at it, `seconds_before` and `seconds_after` the step's seconds up
    to it and from it on, without recomputation.
    """

    def __init__(
        self, problem: RematProblem, index: int, held: frozenset[int], seconds_before: float, seconds_after: float
    ) -> None:
        self._problem = problem
        self._before, self._after = seconds_before, seconds_after
        op = problem.ops[index]
        self._present = held.union(op.reads)
        self._base_bytes = problem.resident_bytes + op.workspace_bytes
        self._base_bytes += sum(problem.storages[s].bytes for s in self._present.union(op.makes))
        first = min(index, problem.forward_ops)
        made = {storage for op in problem.ops[:first] for storage in op.makes}
        later = {storage for op in problem.ops[index + 1 :] for storage in op.reads}
        self._needed = frozenset(made & later) - self._present
        self._needed_bytes = sum(problem.storages[storage].bytes for storage in self._needed)
        self._network: CutNetwork | None = None
        self._points: list[Cut] = []

    def added_seconds(self, budget_bytes: int, link: Link) -> float:
        """Seconds that every schedule with at most `budget_bytes` live at this moment adds; infinite if none can."""
        free = budget_bytes - self._base_bytes
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
            """The bound above with H = `host` bytes."""
            waits = max(0.0, host / rate - self._before)
            return waits + max(line.at(free + host), host / rate - self._after, 0.0)

        meets = [least, most, self._before * rate, self._after * rate]
        meets.append((line.seconds - line.price * free + self._after) / (line.price + 1 / rate))
        if line.price > 0:
            meets.append(line.seconds / line.price - free)
        return min(total(min(max(host, least), most)) for host in meets if host < math.inf)

    def _line(self, allowed: float) -> _Line:
        """A line below the hull that is almost as high as the hull at `allowed` bytes."""
        if allowed >= self._needed_bytes:
            return _Line(0.0, 0.0)
        if self._network is None:
            self._network = CutNetwork(self._problem, self._needed, self._present)
            self._points = list(end_points(self._network))
        points, network = self._points, self._network
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

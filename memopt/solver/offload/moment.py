"""What one moment of a step says about any schedule within a budget that may also offload.

Take the moment at which op o is first evaluated. Let H be the bytes that wait on the host then and come back. Held on
the device instead, they would make a schedule without offloads that holds at most budget + H bytes at o; so what is
recomputed from then on takes at least h(budget + H) seconds, where h is the hull of (bytes alive at o, seconds
recomputed after it) of `lower_bound`. They go out before the moment and come back after it, through one queue each:

    H ≤ bandwidth · (seconds of the ops before o + seconds added before)
    H ≤ bandwidth · (seconds of o and the ops after it + seconds added after)

So what is added is at least the minimum over H of

    max(0, H / bandwidth − before) + max(h(budget + H), H / bandwidth − after)

and with h replaced by a line below it, that is the minimum of a convex function of straight pieces, which lies where
two of them meet. Latency is left out, which only lowers the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.solver.hull import between, end_points
from memopt.solver.link import Link
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.problem import RematProblem

# Hulls are refined this often at most around the bytes asked for.
_REFINEMENTS = 12


@dataclass(frozen=True)
class _Line:
    """No choice that holds b bytes recomputes less than `seconds − price · b` seconds."""

    seconds: float
    price: float

    def at(self, held_bytes: float) -> float:
        return self.seconds - self.price * held_bytes


class Moment:
    """What must be held or recomputed when one op is first evaluated."""

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
        """Seconds that any schedule adds with at most `budget_bytes` at this moment."""
        free = budget_bytes - self._base_bytes
        least = max(0.0, float(-free))  # without so many bytes on the host the moment does not even fit
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
            waits = max(0.0, host / rate - self._before)
            return waits + max(line.at(free + host), host / rate - self._after, 0.0)

        meets = [least, most, self._before * rate, self._after * rate]
        meets.append((line.seconds - line.price * free + self._after) / (line.price + 1 / rate))
        if line.price > 0:
            meets.append(line.seconds / line.price - free)
        return min(total(min(max(host, least), most)) for host in meets if host < math.inf)

    def _line(self, allowed: float) -> _Line:
        """A line below the hull that is nearly as high as the hull at `allowed` bytes."""
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

"""A lower bound on the added seconds of any schedule within a budget that may also offload.

It is the largest of the bounds of a dozen moments (`offload_moment`) and of one on the whole step: whatever is on the
host at a time t went out before t and comes back after it, through one queue each, so it is at most half of what the
link moves one way in the whole step. Held on the device instead, it would make a schedule without offloads, of the same
evaluations, for a budget that is that much larger; any lower bound on such schedules holds. It is not tight where
transfers hide and memory is not needed at all times, nor below what recomputation alone can reach.
"""

from __future__ import annotations

import math

import numpy as np

from memopt.solver.held import Held
from memopt.solver.link import Link
from memopt.solver.lower_bound import LowerBound
from memopt.solver.offload.moment import Moment
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate

_BISECTIONS = 6


def transient_floor(problem: RematProblem) -> tuple[int, int]:
    """The most that one op needs with all else on the host, and that op (-1 for a problem without ops).

    What it reads, makes and works in, and the results made so far, which stay on the device.
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
    """The bound for one problem, at any number of budgets and links."""

    def __init__(self, problem: RematProblem, positions: int = 16) -> None:
        self._problem = problem
        self._without = LowerBound(problem)
        self._floor_bytes = transient_floor(problem)[0]
        self._held = Held(problem)
        self._begins = np.concatenate([[0.0], np.cumsum([op.seconds for op in problem.ops])])
        self._live = simulate(problem, Schedule.save_all(problem)).live_bytes
        self._stretches = [part for part in np.array_split(np.arange(len(problem.ops)), positions) if part.size]
        self._known: dict[int, Moment] = {}

    def added_seconds(self, budget_bytes: int, link: Link) -> float:
        """Seconds that any schedule adds with a peak of at most `budget_bytes`; infinite below the floor."""
        if budget_bytes < self._floor_bytes:
            return math.inf
        at_moments = max((moment.added_seconds(budget_bytes, link) for moment in self._moments(link)), default=0.0)
        return max(at_moments, self._in_all(budget_bytes, link))

    def _moments(self, link: Link) -> list[Moment]:
        """In each stretch of the step, the op with most alive if all is saved, less what the link can move by then."""
        rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else 0.0
        begins = self._begins[:-1]
        crowded = self._live - rate * np.minimum(begins, self._begins[-1] - begins)
        return [self._moment(int(stretch[np.argmax(crowded[stretch])])) for stretch in self._stretches]

    def _moment(self, index: int) -> Moment:
        if index not in self._known:
            before = float(self._begins[index])
            after = self._problem.seconds - before
            self._known[index] = Moment(self._problem, index, self._held[index], before, after)
        return self._known[index]

    def _in_all(self, budget_bytes: int, link: Link) -> float:
        """What schedules without offloads add, were the budget larger by half of what the link can move.

        With A added seconds that is bound(A), which falls in A; so min(A, bound(A)) is a bound for every A.
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

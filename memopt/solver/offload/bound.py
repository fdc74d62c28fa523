"""A lower bound on the added seconds of schedules within a budget that may also offload.

It is the largest of the bounds at a dozen positions (`moment.Moment`) and of a bound on the whole step. The bytes on
the host at a time t were copied out before t and are copied back after t, through one queue each. So they are at most
half of the bytes that the link moves in one direction during the whole step. Held on the device instead, they make a
schedule of the same evaluations without offloads, for a budget that is larger by those bytes; a lower bound on such
schedules applies. The bound is not tight if transfers hide and memory is not needed at all times, nor for budgets below
the smallest peak of recomputation alone.
"""

from __future__ import annotations

import math

import numpy as np

from memopt.solver.held import Held
from memopt.solver.lower_bound import LowerBound
from memopt.solver.offload.moment import Moment
from memopt.solver.problem import Link, RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate

_BISECTIONS = 6


def transient_floor(problem: RematProblem) -> tuple[int, int]:
    """The largest need in bytes of one op if all other storages are offloaded, and that op (-1 without ops).

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
        """Seconds that every schedule with a peak of at most `budget_bytes` adds; infinite below the floor."""
        if budget_bytes < self._floor_bytes:
            return math.inf
        at_moments = max((moment.added_seconds(budget_bytes, link) for moment in self._moments(link)), default=0.0)
        return max(at_moments, self._in_all(budget_bytes, link))

    def _moments(self, link: Link) -> list[Moment]:
        """For each part of the step, the moment of the op with the most live bytes that the link cannot have moved."""
        rate = link.bytes_per_second if math.isfinite(link.bytes_per_second) else 0.0
        begins = self._begins[:-1]
        crowded = self._live - rate * np.minimum(begins, self._begins[-1] - begins)
        return [self._moment(int(stretch[np.argmax(crowded[stretch])])) for stretch in self._stretches]

    def _moment(self, index: int) -> Moment:
        """The moment of op `index`, cached."""
        if index not in self._known:
            before = float(self._begins[index])
            after = self._problem.seconds - before
            self._known[index] = Moment(self._problem, index, self._held[index], before, after)
        return self._known[index]

    def _in_all(self, budget_bytes: int, link: Link) -> float:
        """The bound on the whole step: of schedules without offloads at a budget larger by half of the moved bytes.

        A step with A added seconds gives bound(A), which falls in A, so min(A, bound(A)) is a bound for every A. The
        best A is found by bisection.
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

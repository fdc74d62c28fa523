"""What `effort="best"` does with its time: the exact reference where the problem is small, then that on windows of
the best schedule, in turn with local search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays
from memopt.solver.liveness import to_array
from memopt.solver.problem import RematProblem
from memopt.solver.search import Candidate, Search, candidate

# Ops of the forward up to which the exact reference is worth its time.
_MOST_FORWARD_OPS = 80
# Evaluations of the repairs between two reports of progress: a fraction of a second.
_ROUND = 10_000
# Windows between two rounds of local search, their lengths in first evaluations, and the seconds for each.
_WINDOWS, _STAGES, _WINDOW_SECONDS = 3, (6, 12, 20), 3.0
# As a share of the step.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Progress:
    """How far a search has come."""

    seconds: float
    """Of wall time since the search began."""
    added_seconds: float
    """Of the best schedule so far."""
    lower_bound_seconds: float


def search_on(
    problem: RematProblem,
    arrays: Arrays,
    search: Search,
    seeds: Sequence[Candidate],
    bound_seconds: float,
    limit_seconds: float,
    report: Callable[[Progress], None] | None,
) -> None:
    """Better `search.best` until it is proven, meets the bound, or `limit_seconds` of wall time are over.

    `seeds` begins with the plan that saves everything. The exact reference gets half of the time at most.
    """
    started = time.monotonic()

    def goes_on() -> bool:
        assert search.best is not None
        elapsed = time.monotonic() - started
        if report is not None:
            report(Progress(elapsed, search.best.added_seconds, bound_seconds))
        return elapsed < limit_seconds and search.best.added_seconds > bound_seconds + _CLOSE * problem.seconds

    assert search.best is not None
    if goes_on() and problem.forward_ops <= _MOST_FORWARD_OPS:
        from memopt.solver.exact import solve_exactly  # scipy.optimize takes a while to import

        most = search.best.added_seconds
        exact = solve_exactly(problem, search.cap_bytes, seconds=limit_seconds / 2, below_seconds=most)
        if exact.schedule is not None:
            search.offer(candidate(arrays, "exact", to_array(exact.schedule)))
            search.polish(search.best)
        if exact.proven:
            return
    draw = np.random.default_rng(0)
    while goes_on():
        for _ in range(_WINDOWS):
            left = limit_seconds - (time.monotonic() - started)
            _solve_window(problem, arrays, search, draw, min(left, _WINDOW_SECONDS))
        search.explore(seeds[0], seeds[1:], _ROUND)


def _solve_window(
    problem: RematProblem, arrays: Arrays, search: Search, draw: np.random.Generator, seconds: float
) -> None:
    """Choose anew what the best schedule evaluates again in one stretch of it, within `seconds`."""
    if seconds <= 0:
        return
    from memopt.solver.windows import random_window, solved  # scipy.optimize takes a while to import

    assert search.best is not None
    evaluations = search.best.evaluations
    stretch = random_window(problem, arrays, evaluations, int(draw.choice(_STAGES)), draw)
    better = None if stretch is None else solved(evaluations, stretch, search.cap_bytes, seconds)
    if better is not None:
        search.improve(candidate(arrays, "exact windows", better), ())

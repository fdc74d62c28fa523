"""The search of `effort="best"`: the exact solver for small problems, then in turn the exact solver on windows of the
best schedule and local search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays
from memopt.solver.liveness import to_array
from memopt.solver.problem import RematProblem
from memopt.solver.search import Candidate, Search, candidate

# The exact solver is tried on problems with at most this many forward ops.
_MOST_FORWARD_OPS = 80
# Evaluations that repairs make in one round of local search, a fraction of a second, after which progress is reported.
_ROUND = 10_000
# Windows between two rounds of local search, their possible lengths in first evaluations, and the seconds for one.
_WINDOWS, _STAGES, _WINDOW_SECONDS = 3, (6, 12, 20), 3.0
# The search ends when the best schedule is this close to the lower bound, as a share of the step's seconds.
_CLOSE = 1e-6


@dataclass(frozen=True)
class Progress:
    """The state of a search at one time."""

    seconds: float
    """Wall time in seconds since the search began."""
    added_seconds: float
    """Seconds that the best schedule so far adds to the step."""
    lower_bound_seconds: float
    """Seconds that every schedule within the budget adds."""


def search_on(
    problem: RematProblem,
    arrays: Arrays,
    search: Search,
    seeds: Sequence[Candidate],
    bound_seconds: float,
    limit_seconds: float,
    report: Callable[[Progress], None] | None,
) -> None:
    """Improve `search.best` until it is proven optimal, meets `bound_seconds`, or `limit_seconds` have passed.

    `seeds` must begin with the plan that saves everything. The exact solver gets at most half of the time.
    """
    started = time.monotonic()

    def continues() -> bool:
        """Report progress; returns whether time is left and the best is not yet close to the bound."""
        assert search.best is not None
        elapsed = time.monotonic() - started
        if report is not None:
            report(Progress(elapsed, search.best.added_seconds, bound_seconds))
        return elapsed < limit_seconds and search.best.added_seconds > bound_seconds + _CLOSE * problem.seconds

    assert search.best is not None
    if continues() and problem.forward_ops <= _MOST_FORWARD_OPS:
        from memopt.solver.exact import solve_exactly  # scipy.optimize takes a while to import

        most = search.best.added_seconds
        exact = solve_exactly(problem, search.cap_bytes, seconds=limit_seconds / 2, below_seconds=most)
        if exact.schedule is not None:
            search.offer(candidate(arrays, "exact", to_array(exact.schedule)))
            search.polish(search.best)
        if exact.proven:
            return
    draw = np.random.default_rng(0)
    while continues():
        for _ in range(_WINDOWS):
            left = limit_seconds - (time.monotonic() - started)
            _solve_window(problem, arrays, search, draw, min(left, _WINDOW_SECONDS))
        search.explore(seeds[0], seeds[1:], _ROUND)


def _solve_window(
    problem: RematProblem, arrays: Arrays, search: Search, draw: np.random.Generator, seconds: float
) -> None:
    """Optimise the recomputations in one random window of the best schedule, within `seconds` of wall time."""
    if seconds <= 0:
        return
    from memopt.solver.windows import random_window, solved  # scipy.optimize takes a while to import

    assert search.best is not None
    evaluations = search.best.evaluations
    stretch = random_window(problem, arrays, evaluations, int(draw.choice(_STAGES)), draw)
    better = None if stretch is None else solved(evaluations, stretch, search.cap_bytes, seconds)
    if better is not None:
        search.improve(candidate(arrays, "exact windows", better), ())

"""Finds fast schedules within one cap: repairs and polishes given schedules, then searches around the best.
`effort="best"` adds more local search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Ints, added_seconds, peak_bytes
from memopt.solver.polish import LENGTH_EXPONENTS, polish, polish_at_random, ruin
from memopt.solver.repair import repair

# Exponents (p, a) of the repair's rule, bytes^p and distance^a. No pair is best everywhere; these sets lost least on
# transformers, hourglasses, chains and random graphs, at budgets from near save-all down to the smallest peak.
SAVE_ALL_POWERS = ((1.0, 0.5), (1.2, 0.3), (0.5, 0.0), (0.5, 0.5), (0.7, 0.2), (1.0, 1.0))
NEAREST_POWERS = ((1.0, 0.5), (1.0, 0.0), (0.5, 1.0))
NEXT_POWERS = ((1.0, 0.5), (1.0, 1.5))
# A schedule with more evaluations per op than this is not improved: that would take many seconds.
_LONGEST = 12
# Share of the local search's rounds that change the best plan in one place (`ruin`).
_RUINED = 0.5
_RULES = (*SAVE_ALL_POWERS, *NEAREST_POWERS)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule with its peak and added seconds, and the method by which it was found."""

    method: str
    evaluations: Ints
    peak_bytes: int
    added_seconds: float


def candidate(arrays: Arrays, method: str, evaluations: Ints) -> Candidate:
    """A `Candidate` for the schedule `evaluations` (indices of ops), found by `method`, with its peak and seconds."""
    return Candidate(method, evaluations, peak_bytes(arrays, evaluations), added_seconds(arrays, evaluations))


class Search:
    """The best schedule found yet under one cap on live bytes, and ways to improve it. Deterministic: the random
    numbers of the local search have a fixed seed.

    Once the best schedule adds `enough_seconds` or less, no schedule is repaired or polished any more."""

    def __init__(self, arrays: Arrays, cap_bytes: int, enough_seconds: float = -1.0) -> None:
        self._arrays = arrays
        self.cap_bytes = cap_bytes
        self._enough_seconds = enough_seconds
        self._random = np.random.default_rng(0)
        self.best: Candidate | None = None
        self.spent = 0
        """Evaluations that all repairs have made: a measure of work that, unlike time, is the same in every run."""
        self._polished: set[bytes] = set()
        """The evaluations that `polish` was called with."""

    @property
    def done(self) -> bool:
        """Whether the best schedule adds `enough_seconds` or less."""
        return self.best is not None and self.best.added_seconds <= self._enough_seconds

    def offer(self, plan: Candidate | None) -> bool:
        """Make `plan` the best if it fits the cap and is faster than the best so far; returns whether it was."""
        if plan is None or plan.peak_bytes > self.cap_bytes:
            return False
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def polish(self, plan: Candidate, method: str | None = None) -> None:
        """Remove recomputations from a plan, by `polish` with each of `LENGTH_EXPONENTS`, and offer the results. Their
        method is `method`, by default the name of the plan's solver and "polished". Does nothing if the plan does not
        fit or is too long, the search is done, or a plan with the same evaluations was polished before."""
        evaluations = plan.evaluations.tobytes()
        if plan.peak_bytes > self.cap_bytes or self.done or self._is_long(plan) or evaluations in self._polished:
            return
        self._polished.add(evaluations)
        for length_exponent in LENGTH_EXPONENTS:
            polished = polish(self._arrays, plan.evaluations, self.cap_bytes, length_exponent)
            self.offer(candidate(self._arrays, method or f"{root_of(plan.method)}, polished", polished))

    def repair(self, seed: Candidate, powers: Sequence[tuple[float, float]]) -> None:
        """Repair the seed under the cap by each eviction rule of `powers` (see `repaired`), and polish the results."""
        for rule in powers:
            plan = self.repaired(seed, rule)
            if plan is not None:
                self.polish(plan, plan.method)

    def repaired(self, seed: Candidate, rule: tuple[float, float]) -> Candidate | None:
        """The seed made to fit the cap by a replay that evicts values when memory is full, and recomputes them when
        they are read. `rule` is (p, a): the value with the least seconds / (bytes^p · distance^a) is evicted first,
        where seconds are those to recompute it and distance is the number of evaluations until it is read next. None if
        the result does not fit, the search is done, or the seed is too long."""
        if self.done or self._is_long(seed):
            return None
        evaluations, spent = repair(self._arrays, seed.evaluations, self.cap_bytes, *rule)
        self.spent += spent
        return (
            None if evaluations is None else candidate(self._arrays, f"{root_of(seed.method)}, repaired", evaluations)
        )

    def explore(self, save_all: Candidate, seeds: Sequence[Candidate], evaluations: int) -> None:
        """Local search: some hundreds of rounds, each of which offers a changed version of a known plan.

        A round recomputes a few more values of the best plan (`ruin`), or repairs a plan with random noise under a
        slightly smaller cap; then it polishes the result. The plan to repair is mostly the best one, else `save_all`,
        the plan that saves everything, or one of `seeds`. Ends early when the rounds have made about `evaluations`
        evaluations together (see `spent`), or the search is done.
        """
        draw = self._random
        limit = self.spent + evaluations
        for _ in range(min(max(400, self._arrays.seconds.size), 600)):
            if self.best is None or self.done or self.spent >= limit or self._is_long(self.best):
                return
            if draw.random() < _RUINED:
                self.offer(self._ruined(self.best))
                continue
            kind = draw.random()
            if kind < 0.6:
                seed, spread, shrink = self.best, draw.choice((0.0, 0.1, 0.3, 0.8)), 0.15
            elif kind < 0.8 or not seeds:
                seed, spread, shrink = save_all, draw.choice((0.05, 0.1, 0.2, 0.4)), 0.05
            else:
                seed, spread, shrink = seeds[int(draw.integers(len(seeds)))], 0.3, 0.15
            self.offer(self._nearby(seed, spread, int(self.cap_bytes * (1 - shrink * draw.random() ** 2))))

    def _ruined(self, seed: Candidate) -> Candidate | None:
        """The seed with a few held values recomputed instead, polished with noise; it may not fit the cap."""
        draw, arrays = self._random, self._arrays
        plan = ruin(arrays, seed.evaluations, draw)
        self.spent += seed.evaluations.size // 4
        plan = polish_at_random(arrays, plan, self.cap_bytes, draw)
        return candidate(arrays, f"{root_of(seed.method)}, local search", plan)

    def _is_long(self, plan: Candidate) -> bool:
        """Whether the plan has too many evaluations to be improved in good time."""
        return plan.evaluations.size > _LONGEST * self._arrays.seconds.size

    def _nearby(self, seed: Candidate, spread: float, cap_bytes: int) -> Candidate | None:
        """The seed repaired and polished, each by a random rule and with random noise; None if the repair fails."""
        draw, arrays = self._random, self._arrays
        rule = _RULES[int(draw.integers(len(_RULES)))]
        noise = np.exp(draw.normal(0.0, spread, arrays.size.size))
        plan, spent = repair(arrays, seed.evaluations, cap_bytes, *rule, noise=noise)
        self.spent += spent
        if plan is None:
            return None
        plan = polish_at_random(arrays, plan, self.cap_bytes, draw)
        return candidate(arrays, f"{root_of(seed.method)}, local search", plan)


def root_of(method: str) -> str:
    """The name of the solver that a plan comes from: "minimum cut" for the method "minimum cut, polished"."""
    return method.split(",")[0]


# Evaluations that repairs make between two reports of progress: a fraction of a second.
_ROUND = 10_000


@dataclass(frozen=True)
class Progress:
    """How far a search has come: the seconds used, the best added seconds so far, and their lower bound."""

    seconds: float
    """Wall time in seconds since the search began."""
    added_seconds: float
    """Seconds that the best schedule so far adds to the step."""
    lower_bound_seconds: float
    """A lower bound on the seconds that any schedule within the budget adds."""


def search_on(
    search: Search,
    seeds: Sequence[Candidate],
    bound_seconds: float,
    limit_seconds: float,
    report: Callable[[Progress], None] | None,
) -> None:
    """Improve `search.best` by local search until the search is done, or `limit_seconds` have passed.

    `seeds` are plans to start from; the first must be the one that saves everything. `report`, if given, is called with
    the progress before each part of the search and at its end; `bound_seconds` is its lower bound."""
    started = time.monotonic()
    while True:
        assert search.best is not None
        elapsed = time.monotonic() - started
        if report is not None:
            report(Progress(elapsed, search.best.added_seconds, bound_seconds))
        if elapsed >= limit_seconds or search.done:
            return
        search.explore(seeds[0], seeds[1:], _ROUND)

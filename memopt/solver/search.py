"""Finds fast schedules within one cap: repairs and polishes many seeds, then searches around the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.liveness import added_seconds, peak_bytes
from memopt.solver.polish import polish
from memopt.solver.repair import repair
from memopt.solver.ruin import ruin

# (p, a) of the repair's rule, bytes^p and distance^a. None is best everywhere; these together lost least on
# transformers, hourglasses, chains and random graphs, from near save-all down to the smallest peak.
SAVE_ALL_POWERS = ((1.0, 0.5), (1.2, 0.3), (0.5, 0.0), (0.5, 0.5), (0.7, 0.2), (1.0, 1.0))
NEAREST_POWERS = ((1.0, 0.5), (1.0, 0.0), (0.5, 1.0))
NEXT_POWERS = ((1.0, 0.5), (1.0, 1.5))
LENGTH_EXPONENTS = (0.0, 0.5, 1.0)
# A seed of more evaluations of each op than this, on average, is left as it is: to better it would take many seconds.
_LONGEST = 12
# Share of the local search's rounds that change the best plan in one place.
_RUINED = 0.5
_RULES = (*SAVE_ALL_POWERS, *NEAREST_POWERS)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule with what it costs."""

    method: str
    evaluations: Ints
    peak_bytes: int
    added_seconds: float


def candidate(arrays: Arrays, method: str, evaluations: Ints) -> Candidate:
    """Measure a schedule."""
    return Candidate(method, evaluations, peak_bytes(arrays, evaluations), added_seconds(arrays, evaluations))


class Search:
    """The best schedule so far under one cap, and ways to better it. Deterministic: its noise has a fixed seed.

    Once the best adds `enough_seconds` or less, nothing is tried any more.
    """

    def __init__(self, arrays: Arrays, cap_bytes: int, enough_seconds: float = -1.0) -> None:
        self._arrays = arrays
        self.cap_bytes = cap_bytes
        self._enough_seconds = enough_seconds
        self._random = np.random.default_rng(0)
        self.best: Candidate | None = None
        self.spent = 0
        """Evaluations that all repairs made: a measure of work that, unlike time, is the same in every run."""

    @property
    def done(self) -> bool:
        return self.best is not None and self.best.added_seconds <= self._enough_seconds

    def offer(self, plan: Candidate | None) -> bool:
        """Take the plan if it fits and is faster than the best."""
        if plan is None or plan.peak_bytes > self.cap_bytes:
            return False
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def polish(self, plan: Candidate, method: str | None = None) -> None:
        """Spend what memory a fitting plan leaves, by several orders."""
        for length_exponent in () if self.done or self._is_long(plan) else LENGTH_EXPONENTS:
            evaluations = polish(self._arrays, plan.evaluations, self.cap_bytes, length_exponent)
            self.offer(candidate(self._arrays, method or f"{_root(plan.method)}, polished", evaluations))

    def improve(self, plan: Candidate, powers: Sequence[tuple[float, float]]) -> None:
        """Polish the plan if it fits; repair it too, as it may be near to better ones."""
        if self.offer(plan) or plan.peak_bytes <= self.cap_bytes:
            self.polish(plan)
        self.repair(plan, powers)

    def repair(self, seed: Candidate, powers: Sequence[tuple[float, float]]) -> None:
        """Replay a seed under the cap by each rule of eviction, and polish what comes out."""
        for rule in powers:
            plan = self.repaired(seed, rule)
            if plan is not None:
                self.polish(plan, plan.method)

    def repaired(self, seed: Candidate, rule: tuple[float, float]) -> Candidate | None:
        """One repair of one seed; None where it does not fit."""
        if self.done or self._is_long(seed):
            return None
        evaluations, spent = repair(self._arrays, seed.evaluations, self.cap_bytes, *rule)
        self.spent += spent
        return None if evaluations is None else candidate(self._arrays, f"{_root(seed.method)}, repaired", evaluations)

    def explore(self, save_all: Candidate, seeds: Sequence[Candidate], evaluations: int) -> None:
        """Local search: ruin the best plan, or repair one with noise, mostly the best under a smaller cap; polish it.

        Ends when its repairs have made about as many `evaluations` together, or after some hundreds of them.
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
        """The seed with a few values let go, polished with noise, which may not fit."""
        draw, arrays = self._random, self._arrays
        plan = ruin(arrays, seed.evaluations, draw)
        self.spent += seed.evaluations.size // 4
        noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3, 1.0)), arrays.seconds.size))
        plan = polish(arrays, plan, self.cap_bytes, draw.choice(LENGTH_EXPONENTS), noise)
        return candidate(arrays, f"{_root(seed.method)}, local search", plan)

    def _is_long(self, plan: Candidate) -> bool:
        return plan.evaluations.size > _LONGEST * self._arrays.seconds.size

    def _nearby(self, seed: Candidate, spread: float, cap_bytes: int) -> Candidate | None:
        """A repair and a polish of the seed, each by a rule drawn at random and with random noise."""
        draw, arrays = self._random, self._arrays
        rule = _RULES[int(draw.integers(len(_RULES)))]
        noise = np.exp(draw.normal(0.0, spread, arrays.size.size))
        plan, spent = repair(arrays, seed.evaluations, cap_bytes, *rule, noise=noise)
        self.spent += spent
        if plan is None:
            return None
        noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3, 1.0)), arrays.seconds.size))
        plan = polish(arrays, plan, self.cap_bytes, draw.choice(LENGTH_EXPONENTS), noise)
        return candidate(arrays, f"{_root(seed.method)}, local search", plan)


def _root(method: str) -> str:
    """The seed that a plan comes from."""
    return method.split(",")[0]

"""Finds fast schedules within one cap: repairs and polishes many seeds, then searches around the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.liveness import added_seconds, peak_bytes
from memopt.solver.polish import polish
from memopt.solver.repair import repair

# (bytes^p, distance^a) of the repair's rule. None is best everywhere: a = 0 wins near save-all, a = 1 in deep plans.
EXPONENTS = ((1.0, 1.0), (1.0, 0.0), (1.0, 0.5), (0.7, 1.0), (0.5, 0.5))


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
    """The best schedule so far under one cap, and ways to better it. Deterministic: its noise has a fixed seed."""

    def __init__(self, arrays: Arrays, cap_bytes: int) -> None:
        self._arrays = arrays
        self._cap_bytes = cap_bytes
        self._random = np.random.default_rng(0)
        self.best: Candidate | None = None

    def offer(self, plan: Candidate | None) -> bool:
        """Take the plan if it fits and is faster than the best."""
        if plan is None or plan.peak_bytes > self._cap_bytes:
            return False
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def polish(self, plans: Iterable[Candidate]) -> None:
        """Spend what memory each fitting plan leaves, by several orders."""
        for plan in plans:
            for length_exponent in (0.0, 0.5, 1.0):
                evaluations = polish(self._arrays, plan.evaluations, self._cap_bytes, length_exponent)
                self.offer(candidate(self._arrays, _polished(plan.method), evaluations))

    def repair(self, seeds: Sequence[Candidate], exponents: Sequence[tuple[float, float]] = EXPONENTS) -> None:
        """Replay each seed under the cap by each rule of eviction, and polish what comes out."""
        for seed in seeds:
            for powers in exponents:
                self.offer(self.repaired(seed, powers))

    def repaired(self, seed: Candidate, powers: tuple[float, float]) -> Candidate | None:
        """One repair of one seed, polished; None where it does not fit."""
        evaluations = repair(self._arrays, seed.evaluations, self._cap_bytes, *powers)
        if evaluations is None:
            return None
        method = f"{_root(seed.method)}, repaired"
        return candidate(self._arrays, method, polish(self._arrays, evaluations, self._cap_bytes))

    def explore(self, seeds: Sequence[Candidate], rounds: int) -> None:
        """Local search: repair the best plan (at times a seed) with noisy scores under a smaller cap, and polish."""
        draw = self._random
        for _ in range(rounds):
            if self.best is None:
                return
            seed = self.best if not seeds or draw.random() < 0.7 else seeds[int(draw.integers(len(seeds)))]
            noise = np.exp(draw.normal(0.0, draw.choice((0.1, 0.3, 0.8)), self._arrays.size.size))
            cap_bytes = int(self._cap_bytes * (1 - 0.08 * draw.random() ** 2))
            powers = EXPONENTS[int(draw.integers(len(EXPONENTS)))]
            evaluations = repair(self._arrays, seed.evaluations, cap_bytes, *powers, noise=noise)
            if evaluations is not None:
                evaluations = polish(self._arrays, evaluations, self._cap_bytes, draw.choice((0.0, 0.5, 1.0)))
                self.offer(candidate(self._arrays, f"{_root(seed.method)}, local search", evaluations))


def _root(method: str) -> str:
    """The seed that a plan comes from."""
    return method.split(",")[0]


def _polished(method: str) -> str:
    return method if method.endswith("polished") else f"{method}, polished"

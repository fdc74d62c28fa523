"""Finds fast schedules with offloads within one cap, by placing offloads into many orders of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints
from memopt.solver.liveness import added_seconds, peak_bytes, remove_dead
from memopt.solver.offload.place import Placer
from memopt.solver.offload.timing import most_on_host, stalled_seconds
from memopt.solver.polish import polish
from memopt.solver.repair import repair
from memopt.solver.ruin import ruin
from memopt.solver.search import LENGTH_EXPONENTS, SAVE_ALL_POWERS

# Transfers are planned as if the link were faster by these factors, in turn, until a plan fits; such plans may stall.
_SPEEDUPS = (1.0, 1.03, 1.1, 1.3, 2.0, 4.0, 10.0, 100.0, 1e6, float("inf"))
# The number of speedups with a plan that fits after which no more are tried: the second plan may stall less.
_MOST_FITTING = 2
# The most rounds of a local search.
_MOST_ROUNDS = 600
# Share of the local search's rounds that replay the whole plan; the others change it in one place.
_REPAIRED = 0.3


@dataclass(frozen=True, eq=False)
class OffloadCandidate:
    """A schedule with its offloads (rows as `Placer.place` returns them) and its added seconds."""

    method: str
    evaluations: Ints
    offloads: Ints
    added_seconds: float
    """Seconds of recomputation and of waits for transfers."""


class OffloadSearch:
    """The best schedule so far under one cap and over one link. Deterministic: its noise has a fixed seed.

    `transfer_seconds` are the seconds of each storage's transfer in one direction.
    """

    def __init__(self, arrays: Arrays, cap_bytes: int, transfer_seconds: Floats, host_bytes: int | None = None) -> None:
        self._arrays = arrays
        self._cap_bytes = cap_bytes
        self._transfer_seconds = transfer_seconds
        self._host_bytes = host_bytes
        self._random = np.random.default_rng(0)
        self.best: OffloadCandidate | None = None
        self.spent = 0
        """The length of all schedules into which offloads were placed: a measure of work, the same in every run."""

    def offer(self, plan: OffloadCandidate) -> bool:
        """Make `plan`, which must fit, the best if it is faster than the best; returns whether it was."""
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def offer_again(self, plan: OffloadCandidate) -> bool:
        """Offer a plan that another search found for a cap no larger than this one's, timed over this link."""
        host_bytes = most_on_host(self._arrays, plan.evaluations, plan.offloads)
        if self._host_bytes is not None and host_bytes > self._host_bytes:
            return False
        return self.offer(self._timed(plan.method, plan.evaluations, plan.offloads))

    def consider(self, method: str, evaluations: Ints, speedups: Sequence[float] = _SPEEDUPS) -> bool:
        """Place offloads into this order of evaluations and offer the results.

        Offloads are planned for a link that is faster by each of `speedups`, until some plans fit; those are timed with
        the link's real speed. Returns True if the best has changed, or if the order recomputes too much to become best.
        """
        recomputed = added_seconds(self._arrays, evaluations)
        if self.best is not None and recomputed >= self.best.added_seconds:
            return True
        placer = Placer(self._arrays, evaluations)
        better, fitting = False, 0
        for speedup in speedups:
            self.spent += evaluations.size
            offloads = placer.place(self._cap_bytes, self._transfer_seconds / speedup, self._host_bytes)
            if offloads is None:
                continue
            plan = self._timed(method, evaluations, offloads)
            better |= self.offer(plan)
            fitting += 1
            if plan.added_seconds <= recomputed or fitting == _MOST_FITTING:
                break
        return better

    def _timed(self, method: str, evaluations: Ints, offloads: Ints) -> OffloadCandidate:
        """The schedule as a candidate, with its seconds of recomputation and of waits for this link."""
        waiting = stalled_seconds(self._arrays, evaluations, offloads, self._transfer_seconds)
        return OffloadCandidate(method, evaluations, offloads, added_seconds(self._arrays, evaluations) + waiting)

    def drop(self, evaluations: int) -> None:
        """Remove one recomputation at a time from the best plan, the slowest first, if more offloads make up for it.

        Ends when the schedules tried have about `evaluations` evaluations together.
        """
        limit = self.spent + evaluations
        rank = 0
        while self.best is not None and self.spent < limit:
            order = _repeated(self._arrays, self.best.evaluations)
            if rank >= order.size:
                return
            without = remove_dead(self._arrays, np.delete(self.best.evaluations, order[rank]))
            before = self.best
            self.consider(f"{_root(before.method)}, fewer again", without, self._likely_speedups())
            rank += before is self.best

    def explore(self, evaluations: int) -> None:
        """Local search: change the best plan's recomputations, polish it under a cap near its peak, place offloads.

        If compute waits for the link, the polish is sometimes left out, so that the link has less to move. Ends when
        the schedules tried have about `evaluations` evaluations together, or after some hundreds of rounds.
        """
        draw, arrays = self._random, self._arrays
        limit = self.spent + evaluations
        for _ in range(_MOST_ROUNDS):
            if self.best is None or self.best.added_seconds == 0 or self.spent >= limit:
                return
            seed = self.best.evaluations
            self.spent += seed.size
            kind, shift = draw.random(), draw.choice((0.0, 0.003, 0.03)) * draw.uniform(-1, 1)
            cap_bytes = int(max(peak_bytes(arrays, seed), self._cap_bytes) * (1 + shift))
            if kind < _REPAIRED:
                changed = self._repaired(seed, cap_bytes)
            else:
                changed = seed if kind < 0.5 else ruin(arrays, seed, draw)
            if kind < 0.9 or self.best.added_seconds == added_seconds(arrays, seed):
                noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3, 1.0)), arrays.seconds.size))
                changed = polish(arrays, changed, cap_bytes, draw.choice(LENGTH_EXPONENTS), noise)
            self.consider(f"{_root(self.best.method)}, local search", changed, self._likely_speedups())

    def _repaired(self, seed: Ints, cap_bytes: int) -> Ints:
        """The seed repaired with noise under a somewhat smaller cap; the seed itself if the repair fails."""
        draw = self._random
        noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3)), self._arrays.size.size))
        rule = SAVE_ALL_POWERS[int(draw.integers(len(SAVE_ALL_POWERS)))]
        evaluations, spent = repair(self._arrays, seed, int(cap_bytes * (1 - 0.1 * draw.random() ** 2)), *rule, noise)
        self.spent += spent
        return seed if evaluations is None else evaluations

    def _likely_speedups(self) -> Sequence[float]:
        """The speedups worth trying near the best plan: only the smallest ones if that plan never waits."""
        assert self.best is not None
        waits = self.best.added_seconds > added_seconds(self._arrays, self.best.evaluations)
        return _SPEEDUPS if waits else _SPEEDUPS[:2]


def _repeated(arrays: Arrays, evaluations: Ints) -> Ints:
    """Positions of all recomputations, those of the slowest ops first."""
    again = np.ones(evaluations.size, np.bool_)
    again[np.unique(evaluations, return_index=True)[1]] = False
    positions = np.flatnonzero(again)
    return positions[np.argsort(-arrays.seconds[evaluations[positions]], kind="stable")]


def _root(method: str) -> str:
    """The name of the solver that a plan comes from: its method without the improvements."""
    return method.split(",")[0]

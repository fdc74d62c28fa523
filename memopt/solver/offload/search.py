"""Finds fast schedules with offloads within one cap: places offloads into many orders of evaluations."""

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

# Transfers are planned this many times as fast as they are, until the plan fits: what is planned too fast stalls.
_SPEEDUPS = (1.0, 1.03, 1.1, 1.3, 2.0, 4.0, 10.0, 100.0, 1e6, float("inf"))
# How many speedups are tried from the first whose plan fits: a plan made for a faster link may stall less.
_MOST_FITTING = 2
_MOST_ROUNDS = 600
# Share of the local search's rounds that replay the whole plan; the others change it in one place.
_REPAIRED = 0.3


@dataclass(frozen=True, eq=False)
class OffloadCandidate:
    """A schedule with its offloads (rows as `Placer.place` gives them), and what it costs."""

    method: str
    evaluations: Ints
    offloads: Ints
    added_seconds: float
    """Of recomputation and of waiting."""


class OffloadSearch:
    """The best schedule so far under one cap over one link. Deterministic: its noise has a fixed seed."""

    def __init__(self, arrays: Arrays, cap_bytes: int, transfer_seconds: Floats, host_bytes: int | None = None) -> None:
        self._arrays = arrays
        self._cap_bytes = cap_bytes
        self._transfer_seconds = transfer_seconds
        self._host_bytes = host_bytes
        self._random = np.random.default_rng(0)
        self.best: OffloadCandidate | None = None
        self.spent = 0
        """Evaluations that all placements went through: a measure of work that is the same in every run."""

    def offer(self, plan: OffloadCandidate) -> bool:
        """Take a plan that is known to fit if it is faster than the best."""
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def offer_again(self, plan: OffloadCandidate) -> bool:
        """Take a plan that another search found for a cap no larger, timed over this search's link."""
        host_bytes = most_on_host(self._arrays, plan.evaluations, plan.offloads)
        if self._host_bytes is not None and host_bytes > self._host_bytes:
            return False
        return self.offer(self._timed(plan.method, plan.evaluations, plan.offloads))

    def consider(self, method: str, evaluations: Ints, speedups: Sequence[float] = _SPEEDUPS) -> bool:
        """Place offloads into this order, planned for each of `speedups` until some fit, and offer it.

        The less a transfer is planned to take, the more fits; the first plans that fit are timed as the link is. True
        where the plan is the best now, and where the order recomputes too much to become that.
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
        waiting = stalled_seconds(self._arrays, evaluations, offloads, self._transfer_seconds)
        return OffloadCandidate(method, evaluations, offloads, added_seconds(self._arrays, evaluations) + waiting)

    def drop(self, evaluations: int) -> None:
        """Do without one repeated evaluation at a time, the slowest first, where the link can take what is then held.

        Ends when its placements have gone through about as many `evaluations`.
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
        """Local search: let a few values of the best plan go, polish it under a cap near to its own, and place anew.

        Where compute waits for the link, what was let go is sometimes left at that: the link has less to move then.
        Ends when its placements have gone through about as many `evaluations`, or after some hundreds of rounds.
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
        """The seed replayed with noise under a cap that is a little smaller, or as it is where that gets stuck."""
        draw = self._random
        noise = np.exp(draw.normal(0.0, draw.choice((0.0, 0.1, 0.3)), self._arrays.size.size))
        rule = SAVE_ALL_POWERS[int(draw.integers(len(SAVE_ALL_POWERS)))]
        evaluations, spent = repair(self._arrays, seed, int(cap_bytes * (1 - 0.1 * draw.random() ** 2)), *rule, noise)
        self.spent += spent
        return seed if evaluations is None else evaluations

    def _likely_speedups(self) -> Sequence[float]:
        """Around a plan that never waits, those that are better wait little at most."""
        assert self.best is not None
        waits = self.best.added_seconds > added_seconds(self._arrays, self.best.evaluations)
        return _SPEEDUPS if waits else _SPEEDUPS[:2]


def _repeated(arrays: Arrays, evaluations: Ints) -> Ints:
    """Positions of evaluations beyond each op's first, the slowest op's first."""
    again = np.ones(evaluations.size, np.bool_)
    again[np.unique(evaluations, return_index=True)[1]] = False
    positions = np.flatnonzero(again)
    return positions[np.argsort(-arrays.seconds[evaluations[positions]], kind="stable")]


def _root(method: str) -> str:
    """The seed that a plan comes from."""
    return method.split(",")[0]

"""Finds fast schedules with offloads within one cap, by placing offloads into many orders of evaluations, and times
them by compiled code; the simulator checks the final schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints, IntTable, added_seconds, peak_bytes, remove_dead
from memopt.solver.native import native
from memopt.solver.offload_place import Placer
from memopt.solver.polish import polish_at_random, ruin
from memopt.solver.problem import Link
from memopt.solver.repair import repair
from memopt.solver.search import SAVE_ALL_POWERS, root_of


def stalled_seconds(arrays: Arrays, evaluations: Ints, offloads: IntTable, transfer_seconds: Floats) -> float:
    """Seconds for which compute waits for transfers, as `Simulation.stall_seconds` counts them.

    The rows of `offloads` are as `Placer.place` returns them; `transfer_seconds` are per storage and direction.
    """
    _, out_after, freed, fetch, stop = offloads.T
    outward, fetched = np.lexsort((freed, out_after)), np.lexsort((stop, fetch))
    by_freed, by_stop = np.argsort(freed, kind="stable"), np.argsort(stop, kind="stable")
    seconds, home = transfer_seconds[offloads[:, 0]], arrays.home[offloads[:, 0]]
    return _wait(arrays.seconds[evaluations], offloads, seconds, home, outward, fetched, by_freed, by_stop)


def most_on_host(arrays: Arrays, evaluations: Ints, offloads: IntTable) -> int:
    """The most bytes on the host at any position; an offload counts from `out_after` up to `back_before`."""
    change = np.zeros(evaluations.size + 1, np.int64)
    moved = offloads[~arrays.home[offloads[:, 0]]]
    np.add.at(change, moved[:, 1], arrays.size[moved[:, 0]])
    np.add.at(change, moved[:, 4], -arrays.size[moved[:, 0]])
    return int(np.cumsum(change).max()) + int(arrays.size[arrays.home].sum())


@native
def _wait(
    compute: Floats,
    offloads: IntTable,
    seconds: Floats,
    home: Flags,
    outward: Ints,
    fetched: Ints,
    by_freed: Ints,
    by_stop: Ints,
) -> float:
    """Seconds for which compute waits, from one pass over the positions with the four kinds of events in order.

    The last four arguments are the offloads by issue of the copy out, by fetch, by freed position and by next read.
    """
    count = seconds.size
    out_done, back_done = np.zeros(count), np.zeros(count)
    now = out_free = back_free = stalls = 0.0
    sent = freed = issued = needed = 0
    for position in range(compute.size):
        start = now
        while freed < count and offloads[by_freed[freed], 2] <= position:
            now = max(now, out_done[by_freed[freed]])
            freed += 1
        while issued < count and offloads[fetched[issued], 3] <= position:
            back_free = max(back_free, now) + seconds[fetched[issued]]
            back_done[fetched[issued]] = back_free
            issued += 1
        while needed < count and offloads[by_stop[needed], 4] <= position:
            now = max(now, back_done[by_stop[needed]])
            needed += 1
        if now > start:
            stalls += now - start
        now += compute[position]
        while sent < count and offloads[outward[sent], 1] <= position:
            if home[outward[sent]]:
                out_done[outward[sent]] = now
            else:
                out_free = max(out_free, now) + seconds[outward[sent]]
                out_done[outward[sent]] = out_free
            sent += 1
    return stalls


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
    """A search for the fastest schedule under one cap and over one link. Deterministic: its noise has a fixed seed."""

    def __init__(self, arrays: Arrays, cap_bytes: int, link: Link, enough_seconds: float = -1.0) -> None:
        self._arrays = arrays
        self.cap_bytes = cap_bytes
        self.link = link
        self._enough_seconds = enough_seconds
        self._transfer_seconds = np.array([link.transfer_seconds(size) for size in arrays.size.tolist()], np.float64)
        """Per storage: the seconds of its transfer in one direction."""
        self._random = np.random.default_rng(0)
        self.best: OffloadCandidate | None = None
        self.spent = 0
        """The length of all schedules into which offloads were placed: a measure of work, the same in every run."""

    @property
    def done(self) -> bool:
        """Whether the best schedule adds `enough_seconds` or less."""
        return self.best is not None and self.best.added_seconds <= self._enough_seconds

    def offer(self, plan: OffloadCandidate) -> bool:
        """Make `plan`, which must fit, the best if it is faster than the best; returns whether it was."""
        if self.best is not None and plan.added_seconds >= self.best.added_seconds:
            return False
        self.best = plan
        return True

    def offer_again(self, plan: OffloadCandidate) -> bool:
        """Offer a plan that another search found for a cap no larger than this one's, timed over this link. Returns
        whether it became the best; False where it exceeds the host's limit."""
        host_bytes = most_on_host(self._arrays, plan.evaluations, plan.offloads)
        if self.link.host_bytes is not None and host_bytes > self.link.host_bytes:
            return False
        return self.offer(self._timed(plan.method, plan.evaluations, plan.offloads))

    def consider(self, method: str, evaluations: Ints, speedups: Sequence[float] = _SPEEDUPS) -> bool:
        """Place offloads into this order of evaluations and offer the results.

        Offloads are planned for a link that is faster by each of `speedups` in turn, until a few plans fit; these are
        timed with the link's real speed. Returns True if the best has changed, or if the order recomputes too much to
        become best. `method` names how the order was found.
        """
        recomputed = added_seconds(self._arrays, evaluations)
        if self.best is not None and recomputed >= self.best.added_seconds:
            return True
        placer = Placer(self._arrays, evaluations)
        better, fitting = False, 0
        for speedup in speedups:
            self.spent += evaluations.size
            offloads = placer.place(self.cap_bytes, self._transfer_seconds / speedup, self.link.host_bytes)
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
        """Try to remove one recomputation at a time from the best plan, the slowest first, and to offload more values
        so that it fits all the same. What is faster becomes the best plan.

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
            self.consider(f"{root_of(before.method)}, fewer again", without, self._likely_speedups())
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
            cap_bytes = int(max(peak_bytes(arrays, seed), self.cap_bytes) * (1 + shift))
            if kind < _REPAIRED:
                changed = self._repaired(seed, cap_bytes)
            else:
                changed = seed if kind < 0.5 else ruin(arrays, seed, draw)
            if kind < 0.9 or self.best.added_seconds == added_seconds(arrays, seed):
                changed = polish_at_random(arrays, changed, cap_bytes, draw)
            self.consider(f"{root_of(self.best.method)}, local search", changed, self._likely_speedups())

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

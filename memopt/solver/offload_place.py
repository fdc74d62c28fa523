"""Chooses the storages that a given order of evaluations offloads, and when they are copied out and back.

A sweep from the first evaluation to the last: if more bytes are live than the cap, the value whose next read is latest
is offloaded (Belady, 1966), provided that its copy out fits into the idle time of the link before that evaluation, and
its copy back before its next read. So values are offloaded only when memory runs out, and for a long time, as in
Capuchin (Peng et al., 2020). All transfers hide behind compute if the link is as fast as planned, else compute waits.

One direction of the link is planned as the times at which it is busy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints, live_bytes
from memopt.solver.native import native, native_part


class _Queue(NamedTuple):
    """The busy intervals in order of time, in seconds of compute."""

    begin: Floats
    end: Floats
    stretches: Ints
    """The number of intervals, as an array of one element."""


def empty_queue(most: int) -> _Queue:
    """An idle queue with room for `most` transfers."""
    return _Queue(np.zeros(most + 1), np.zeros(most + 1), np.zeros(1, np.int64))


@native_part
def earliest_start(queue: _Queue, release: float, seconds: float) -> float:
    """The earliest time, not before `release`, from which the queue is idle for `seconds`."""
    low = np.searchsorted(queue.end[: queue.stretches[0]], release, side="right")
    start = release
    while low < queue.stretches[0] and queue.begin[low] < start + seconds:
        start = max(start, queue.end[low])
        low += 1
    return start


@native_part
def latest_start(queue: _Queue, deadline: float, seconds: float) -> float:
    """The latest time from which the queue is idle for `seconds` that end by `deadline`; it may be negative."""
    low = np.searchsorted(queue.begin[: queue.stretches[0]], deadline) - 1
    stop = deadline
    while low >= 0 and queue.end[low] > stop - seconds:
        stop = min(stop, queue.begin[low])
        low -= 1
    return stop - seconds


@native_part
def book(queue: _Queue, start: float, seconds: float) -> None:
    """Mark the queue as busy for `seconds` from `start`; it must be idle then."""
    begin, end, after = queue.begin, queue.end, queue.stretches[0]
    while after > 0 and begin[after - 1] >= start:
        begin[after], end[after] = begin[after - 1], end[after - 1]
        after -= 1
    begin[after], end[after] = start, start + seconds
    queue.stretches[0] += 1


_NO_LIMIT = 2**62
# Transfers are planned to take longer by this share, so that rounding errors cause no stalls.
_ROUNDING = 1e-9


class _Gaps(NamedTuple):
    """Stretches of a schedule during which a version is live and not used, so that it could be offloaded."""

    storage: Ints
    start: Ints
    """Position of the previous use."""
    stop: Ints
    """Position of the next read."""
    home: Flags
    """Whether the storage lies on the host for the whole step: nothing is copied out."""
    first: Flags
    """Whether the storage is a `home` one and was not copied to the device before: such a gap is always chosen."""


class _GapOffloads(NamedTuple):
    """Per gap: whether its version is offloaded, and when; the other fields are valid only if `chosen`."""

    chosen: Flags
    freed: Ints
    """Position from which on the version's bytes are free."""
    fetch: Ints
    """Position from which on the bytes of the fetched copy are live."""
    out_start: Floats
    """Planned start of the copy out, in seconds of compute since the first evaluation."""
    back_start: Floats
    """Planned start of the copy back, in the same seconds."""


class Placer:
    """Places offloads into one order of evaluations. `place` may be called any number of times, with other limits of
    memory and other speeds of copies."""

    def __init__(self, arrays: Arrays, evaluations: Ints) -> None:
        self._arrays = arrays
        self._live = live_bytes(arrays, evaluations)
        self._time = np.concatenate([[0.0], np.cumsum(arrays.seconds[evaluations])])
        self._gaps = _gaps_of(arrays, evaluations)

    def place(self, cap_bytes: int, transfer_seconds: Floats, host_bytes: int | None = None) -> Ints | None:
        """Offloads with which at most `cap_bytes` are live, for which compute need not wait; None if it finds none.

        `transfer_seconds` are the planned seconds of each storage's transfer in one direction: smaller ones allow more
        offloads. `host_bytes` is the host's limit; None: no limit. Each row of the result has the fields of one
        `Offload`; rows are in the order of the copies out.
        """
        gaps, count = self._gaps, self._gaps.storage.size
        size = self._arrays.size[gaps.storage]
        seconds = transfer_seconds[gaps.storage] * (1 + _ROUNDING)
        live = self._live.copy()
        planned = _GapOffloads(
            np.zeros(count, np.bool_), *np.zeros((2, count), np.int64), *np.zeros((2, count), np.float64)
        )
        room = np.full(live.size, _NO_LIMIT if host_bytes is None else host_bytes, np.int64)
        room -= self._arrays.size[self._arrays.home].sum()
        if room.min(initial=0) < 0:
            return None
        order = np.argsort(gaps.start, kind="stable")
        queues = empty_queue(count), empty_queue(count)
        if not _choose(gaps, size, seconds, self._time, live, cap_bytes, room, order, *queues, planned):
            return None
        chosen = np.flatnonzero(planned.chosen & ~gaps.first)
        _take_back(planned, size, live, cap_bytes, chosen[np.argsort(-seconds[chosen], kind="stable")])
        chosen = np.flatnonzero(planned.chosen)
        fetched = chosen[np.lexsort((gaps.stop[chosen], planned.back_start[chosen]))]
        _loosen(planned, gaps.home, size, live, cap_bytes, fetched)
        chosen = chosen[np.lexsort((planned.freed[chosen], planned.out_start[chosen]))]
        out_after, moved = gaps.start[chosen], ~gaps.home[chosen]
        out_after[moved] = np.maximum.accumulate(out_after[moved])
        return np.column_stack(
            [gaps.storage[chosen], out_after, planned.freed[chosen], planned.fetch[chosen], gaps.stop[chosen]]
        )


def _gaps_of(arrays: Arrays, evaluations: Ints) -> _Gaps:
    """All gaps of a schedule, sorted by their stop."""
    most = int(np.diff(arrays.read_start)[evaluations].sum())
    storage, start, stop = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64)
    none, unused = np.zeros(0, np.bool_), np.full(arrays.size.size, -1, np.int64)
    count = _find_gaps(arrays, evaluations, unused, _Gaps(storage, start, stop, none, none))
    storage, start, stop = storage[:count], start[:count], stop[:count]
    home, made = arrays.home[storage], np.full(arrays.seconds.size, -1, np.int64)
    made[evaluations[::-1]] = np.arange(evaluations.size)[::-1]
    return _Gaps(storage, start, stop, home, home & (start == made[arrays.producer[storage]]))


@native
def _find_gaps(arrays: Arrays, evaluations: Ints, used: Ints, gaps: _Gaps) -> int:
    """Fill `gaps` and return their number. `used` holds each storage's last use, and must be -1 for all at first."""
    count = 0
    for position in range(evaluations.size):
        op = evaluations[position]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            if position > used[storage] + 1 and arrays.movable[storage] and arrays.size[storage] > 0:
                gaps.storage[count] = storage
                gaps.start[count] = used[storage]
                gaps.stop[count] = position
                count += 1
            used[storage] = position
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            used[arrays.makes[at]] = position
    return count


@native
def _choose(
    gaps: _Gaps,
    size: Ints,
    seconds: Floats,
    time: Floats,
    live: Ints,
    cap_bytes: int,
    room: Ints,
    order: Ints,
    outward: _Queue,
    back: _Queue,
    stays: _GapOffloads,
) -> bool:
    """Make the sweep and fill `stays`; returns False if some evaluation cannot be brought within the cap.

    Per gap, `size` is the bytes of its version and `seconds` those of one transfer. `time` is the second at which each
    evaluation begins, `room` the free bytes of the host at each position, `order` the gaps by their start. `outward`
    and `back` are the queues of the copies out and back.
    """
    _bring(gaps, size, seconds, time, live, back, stays)
    active = np.zeros(order.size, np.int64)
    not_before = np.zeros(order.size)  # per gap: a lower bound on the end of its copy out
    count = entered = 0
    for position in range(live.size):
        while entered < order.size and gaps.start[order[entered]] < position:
            if not gaps.first[order[entered]]:
                active[count] = order[entered]
                count += 1
            entered += 1
        while live[position] > cap_bytes:
            count, best = _latest_read(gaps, active, count, not_before, position, time[position])
            if best < 0:
                return False
            gap = active[best]
            home, out_start = gaps.home[gap], time[gaps.start[gap] + 1]
            if not home:
                out_start = earliest_start(outward, out_start, seconds[gap])
                if out_start + seconds[gap] > time[position]:
                    not_before[gap] = out_start + seconds[gap]
                    continue
            count -= 1
            active[best] = active[count]
            back_start = latest_start(back, time[gaps.stop[gap]], seconds[gap])
            fetch = min(np.searchsorted(time, back_start, side="right") - 1, gaps.stop[gap])
            if fetch <= position:
                continue
            if not home:
                free = room[gaps.start[gap] : gaps.stop[gap]]
                if free.min() < size[gap]:
                    continue
                free -= size[gap]
                book(outward, out_start, seconds[gap])
            book(back, back_start, seconds[gap])
            stays.chosen[gap] = True
            stays.freed[gap] = gaps.start[gap] + 1 if home else position
            stays.fetch[gap] = fetch
            stays.out_start[gap] = out_start
            stays.back_start[gap] = back_start
            live[stays.freed[gap] : fetch] -= size[gap]
    return True


@native_part
def _bring(
    gaps: _Gaps, size: Ints, seconds: Floats, time: Floats, live: Ints, back: _Queue, stays: _GapOffloads
) -> None:
    """Plan the first copy to the device of each storage that lies on the host for the whole step.

    The latest are planned first, each as late as those planned before allow. Gaps are in the order of their stop.
    """
    for gap in range(size.size - 1, -1, -1):
        if not gaps.first[gap]:
            continue
        back_start = latest_start(back, time[gaps.stop[gap]], seconds[gap])
        book(back, back_start, seconds[gap])
        stays.chosen[gap] = True
        stays.freed[gap] = gaps.start[gap] + 1
        begun = np.searchsorted(time, back_start, side="right") - 1  # the last evaluation that has begun then, or -1
        stays.fetch[gap] = min(max(begun, stays.freed[gap]), gaps.stop[gap])
        stays.out_start[gap] = time[gaps.start[gap] + 1]
        stays.back_start[gap] = back_start
        live[stays.freed[gap] : stays.fetch[gap]] -= size[gap]


@native_part
def _latest_read(
    gaps: _Gaps, active: Ints, count: int, not_before: Floats, position: int, now: float
) -> tuple[int, int]:
    """Remove the gaps that have ended from `active`.

    Returns the number left, and the index in `active` of the gap that ends last among those whose copy out may be done
    by `now`, or -1.
    """
    best = -1
    at = 0
    while at < count:
        gap = active[at]
        if gaps.stop[gap] <= position:
            count -= 1
            active[at] = active[count]
            continue
        if not_before[gap] <= now and (best < 0 or gaps.stop[gap] > gaps.stop[active[best]]):
            best = at
        at += 1
    return count, best


@native
def _take_back(stays: _GapOffloads, size: Ints, live: Ints, cap_bytes: int, order: Ints) -> None:
    """Remove, in `order`, the offloads that are not needed to keep live bytes within the cap."""
    for gap in order:
        away = live[stays.freed[gap] : stays.fetch[gap]]
        if away.max() + size[gap] <= cap_bytes:
            away += size[gap]
            stays.chosen[gap] = False


@native
def _loosen(stays: _GapOffloads, home: Flags, size: Ints, live: Ints, cap_bytes: int, fetched: Ints) -> None:
    """Free later and fetch earlier if memory allows, so that transfers slower than planned stall compute less.

    `fetched` is the order of the copies back, which does not change.
    """
    for gap in fetched:
        while not home[gap] and stays.freed[gap] < stays.fetch[gap] and live[stays.freed[gap]] + size[gap] <= cap_bytes:
            live[stays.freed[gap]] += size[gap]
            stays.freed[gap] += 1
    earliest = 0
    for gap in fetched:
        at = stays.fetch[gap]
        while at > max(stays.freed[gap], earliest) and live[at - 1] + size[gap] <= cap_bytes:
            live[at - 1] += size[gap]
            at -= 1
        stays.fetch[gap] = at
        earliest = at

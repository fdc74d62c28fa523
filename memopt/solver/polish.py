"""Spends the memory that a schedule leaves unused: drops repeated evaluations whose values can be held instead.

Dropping a repeated evaluation makes its readers bind to the evaluation before it, whose versions then live longer;
what only the dropped evaluation read dies earlier, and what was evaluated again only for it is dropped too. Each drop
is tried on doubly linked lists of reads and taken back exactly (Knuth's dancing links) if memory does not allow it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints
from memopt.solver.liveness import live_bytes, remove_dead
from memopt.solver.native import native

_NONE = -1


class _Links(NamedTuple):
    """A schedule as linked lists. A version is (evaluation, place among its makes), a read (evaluation, place)."""

    evaluations: Ints
    before: Ints
    """Per evaluation: the one before it of the same op, or none."""
    after: Ints
    live: Ints
    alive: Flags
    version_start: Ints
    head: Ints
    """Per version: its first read, or none."""
    tail: Ints
    read_start: Ints
    position: Ints
    """Per read: its evaluation."""
    version: Ints
    previous: Ints
    """Per read: the read of the same version before it, or none."""
    next: Ints
    log: Ints
    """Changes of `live` (from, to, bytes) and removed evaluations since the trial began; see `_remove`."""


def polish(arrays: Arrays, evaluations: Ints, cap_bytes: int, length_exponent: float = 0.5) -> Ints:
    """The schedule without repeated evaluations that `cap_bytes` lets it do without.

    Candidates go by seconds saved for each byte held longer, times the length of that to the power `length_exponent`.
    Where the schedule is within the cap it stays so.
    """
    evaluations = remove_dead(arrays, evaluations)
    links = _link(arrays, evaluations, live_bytes(arrays, evaluations))
    while True:
        order = np.argsort(-_scores(arrays, links, length_exponent), kind="stable")
        if not _drop_all(arrays, links, order, cap_bytes):
            return evaluations[links.alive]


@native
def _link(arrays: Arrays, evaluations: Ints, live: Ints) -> _Links:
    count = evaluations.size
    before = np.full(count, _NONE, np.int64)
    after = np.full(count, _NONE, np.int64)
    version_start = np.zeros(count + 1, np.int64)
    read_start = np.zeros(count + 1, np.int64)
    for i in range(count):
        op = evaluations[i]
        version_start[i + 1] = version_start[i] + arrays.make_start[op + 1] - arrays.make_start[op]
        read_start[i + 1] = read_start[i] + arrays.read_start[op + 1] - arrays.read_start[op]
    head = np.full(version_start[count], _NONE, np.int64)
    tail = np.full(version_start[count], _NONE, np.int64)
    position = np.zeros(read_start[count], np.int64)
    version = np.zeros(read_start[count], np.int64)
    previous = np.full(read_start[count], _NONE, np.int64)
    following = np.full(read_start[count], _NONE, np.int64)
    latest = np.full(arrays.seconds.size, _NONE, np.int64)
    for i in range(count):
        op = evaluations[i]
        for place in range(read_start[i + 1] - read_start[i]):
            storage = arrays.reads[arrays.read_start[op] + place]
            read = read_start[i] + place
            v = version_start[latest[arrays.producer[storage]]] + arrays.slot[storage]
            position[read] = i
            version[read] = v
            previous[read] = tail[v]
            if tail[v] == _NONE:
                head[v] = read
            else:
                following[tail[v]] = read
            tail[v] = read
        before[i] = latest[op]
        if latest[op] != _NONE:
            after[latest[op]] = i
        latest[op] = i
    alive = np.ones(count, np.bool_)
    log = np.zeros(4 * (read_start[count] + 2 * version_start[count] + count + 4), np.int64)
    return _Links(
        evaluations, before, after, live, alive, version_start, head, tail, read_start, position, version, previous,
        following, log,
    )  # fmt: skip


@native
def _death(arrays: Arrays, links: _Links, i: int, place: int) -> int:
    """The last position at which the version made at evaluation `i` is live."""
    op = links.evaluations[i]
    if links.before[i] == _NONE and arrays.kept[arrays.makes[arrays.make_start[op] + place]]:
        return links.evaluations.size - 1
    tail = links.tail[links.version_start[i] + place]
    return i if tail == _NONE else links.position[tail]


@native
def _unread(links: _Links, i: int) -> bool:
    """Whether `i` repeats an op and nothing reads what it makes."""
    heads = links.head[links.version_start[i] : links.version_start[i + 1]]
    return links.before[i] != _NONE and bool(np.all(heads == _NONE))


@native
def _add(links: _Links, logged: int, start: int, stop: int, amount: int) -> int:
    """Add bytes to the positions from `start` up to, not including, `stop`, and log it; the log's new length."""
    if start < stop:
        links.live[start:stop] += amount
        links.log[logged] = start
        links.log[logged + 1] = stop
        links.log[logged + 2] = amount
        return logged + 3
    return logged


@native
def _hand_over(arrays: Arrays, links: _Links, i: int, logged: int) -> int:
    """Let the readers of evaluation `i` read the evaluation of the same op before it."""
    op = links.evaluations[i]
    earlier = links.before[i]
    for place in range(links.version_start[i + 1] - links.version_start[i]):
        size = arrays.size[arrays.makes[arrays.make_start[op] + place]]
        v, w = links.version_start[i] + place, links.version_start[earlier] + place
        died = _death(arrays, links, earlier, place)
        logged = _add(links, logged, i, _death(arrays, links, i, place) + 1, -size)
        if links.head[v] == _NONE:
            continue
        read = links.head[v]
        links.previous[read] = links.tail[w]
        if links.tail[w] == _NONE:
            links.head[w] = read
        else:
            links.next[links.tail[w]] = read
        links.tail[w] = links.tail[v]
        while read != _NONE:
            links.version[read] = w
            read = links.next[read]
        logged = _add(links, logged, died + 1, _death(arrays, links, earlier, place) + 1, size)
    return logged


@native
def _take_back_hand_over(links: _Links, i: int) -> None:
    earlier = links.before[i]
    for place in range(links.version_start[i + 1] - links.version_start[i]):
        v, w = links.version_start[i] + place, links.version_start[earlier] + place
        read = links.head[v]
        if read == _NONE:
            continue
        links.tail[w] = links.previous[read]
        if links.tail[w] == _NONE:
            links.head[w] = _NONE
        else:
            links.next[links.tail[w]] = _NONE
        links.previous[read] = _NONE
        while read != _NONE:
            links.version[read] = v
            read = links.next[read]


@native
def _maker(links: _Links, read: int) -> int:
    """The evaluation that makes the version which `read` reads."""
    return np.searchsorted(links.version_start, links.version[read], "right") - 1


@native
def _remove(arrays: Arrays, links: _Links, i: int, removed: Ints) -> tuple[int, int]:
    """Remove evaluation `i` and, in turn, repeated evaluations that only it needed.

    Fills `removed` in order. Returns the lengths of `removed` and of the log.
    """
    removed[0] = i
    count, done, logged = 1, 0, 0
    while done < count:
        i = removed[done]
        done += 1
        logged = _hand_over(arrays, links, i, logged)
        links.alive[i] = False
        links.after[links.before[i]] = links.after[i]
        if links.after[i] != _NONE:
            links.before[links.after[i]] = links.before[i]
        op = links.evaluations[i]
        for place in range(links.read_start[i + 1] - links.read_start[i]):
            read = links.read_start[i] + place
            storage = arrays.reads[arrays.read_start[op] + place]
            maker, slot, v = _maker(links, read), arrays.slot[storage], links.version[read]
            died = _death(arrays, links, maker, slot)
            previous, following = links.previous[read], links.next[read]
            if previous == _NONE:
                links.head[v] = following
            else:
                links.next[previous] = following
            if following == _NONE:
                links.tail[v] = previous
            else:
                links.previous[following] = previous
            logged = _add(links, logged, _death(arrays, links, maker, slot) + 1, died + 1, -arrays.size[storage])
            queued = np.any(removed[done:count] == maker)
            if links.alive[maker] and _unread(links, maker) and not queued:
                removed[count] = maker
                count += 1
    return count, logged


@native
def _restore(arrays: Arrays, links: _Links, removed: Ints, count: int, logged: int) -> None:
    """Take back `_remove`, step by step in reverse."""
    for done in range(count - 1, -1, -1):
        i = removed[done]
        for read in range(links.read_start[i + 1] - 1, links.read_start[i] - 1, -1):
            previous, following, v = links.previous[read], links.next[read], links.version[read]
            if previous == _NONE:
                links.head[v] = read
            else:
                links.next[previous] = read
            if following == _NONE:
                links.tail[v] = read
            else:
                links.previous[following] = read
        if links.after[i] != _NONE:
            links.before[links.after[i]] = i
        links.after[links.before[i]] = i
        links.alive[i] = True
        _take_back_hand_over(links, i)
    for at in range(0, logged, 3):
        links.live[links.log[at] : links.log[at + 1]] -= links.log[at + 2]


@native
def _scores(arrays: Arrays, links: _Links, length_exponent: float) -> Floats:
    """Per evaluation: seconds that dropping it saves for each byte held longer; 0 where it cannot be dropped."""
    count = links.evaluations.size
    gain = np.zeros(count)
    score = np.zeros(count)
    for i in range(count):
        if not links.alive[i] or links.before[i] == _NONE:
            continue
        op = links.evaluations[i]
        gain[i] = arrays.seconds[op]
        for read in range(links.read_start[i], links.read_start[i + 1]):
            maker, v = _maker(links, read), links.version[read]
            only = links.head[v] == read and links.tail[v] == read
            if only and links.version_start[maker + 1] - links.version_start[maker] == 1:
                gain[i] += gain[maker]
        cost = 1.0
        for place in range(links.version_start[i + 1] - links.version_start[i]):
            if links.head[links.version_start[i] + place] == _NONE:
                continue
            died = _death(arrays, links, links.before[i], place)
            size = arrays.size[arrays.makes[arrays.make_start[op] + place]]
            cost += size * max(i - died, 0) ** length_exponent
        score[i] = (gain[i] + 1e-12) / cost
    return score


@native
def _drop_all(arrays: Arrays, links: _Links, order: Ints, cap_bytes: int) -> bool:
    """Try to drop each repeated evaluation in `order`; whether any could be."""
    removed = np.zeros(links.evaluations.size, np.int64)
    any_dropped = False
    for i in order:
        if not links.alive[i] or links.before[i] == _NONE:
            continue
        start = i
        for place in range(links.version_start[i + 1] - links.version_start[i]):
            start = min(start, _death(arrays, links, links.before[i], place) + 1)
        count, logged = _remove(arrays, links, i, removed)
        fits = True
        for position in range(start, i):
            if links.live[position] > cap_bytes and links.alive[position]:
                fits = False
                break
        if fits:
            any_dropped = True
        else:
            _restore(arrays, links, removed, count, logged)
    return any_dropped

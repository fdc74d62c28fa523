"""A schedule as doubly linked lists of reads, from which recomputations can be removed and put back exactly.

Removing a recomputation lets its readers read the previous evaluation of the same op, and then removes the
recomputations that only it read. The live bytes are kept up to date. Putting back works as in Knuth's "dancing links"
(2000): an unlinked element still knows its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints, live_bytes
from memopt.solver.native import native, native_part

NONE = -1


class Links(NamedTuple):
    """A schedule's evaluations, versions and reads, each numbered from 0; `NONE` stands for a missing neighbour.

    A version is a storage as one evaluation makes it. Evaluation i makes the versions `version_start[i]` up to, not
    including, `version_start[i + 1]`, and `read_start` numbers its reads in the same way.
    """

    seconds: Floats
    """Per evaluation: its seconds."""
    before: Ints
    """Per evaluation: the previous evaluation of the same op, or `NONE`."""
    after: Ints
    """Per evaluation: the next evaluation of the same op, or `NONE`."""
    alive: Flags
    """Per evaluation: True until it is removed."""
    queued: Flags
    """Per evaluation: True if a removal has queued it for removal in turn."""
    live: Ints
    """Per evaluation: live bytes; they mean something only for evaluations that are not removed."""
    version_start: Ints
    maker: Ints
    """Per version: the evaluation that makes it."""
    size: Ints
    """Per version: its bytes."""
    forever: Flags
    """Per version: True for the first version of a kept storage, which is live to the end."""
    head: Ints
    """Per version: its first read, or `NONE`."""
    tail: Ints
    """Per version: its last read, or `NONE`."""
    read_start: Ints
    position: Ints
    """Per read: the evaluation that reads."""
    version: Ints
    """Per read: the version that is read."""
    previous: Ints
    """Per read: the previous read of the same version, or `NONE`."""
    next: Ints
    """Per read: the next read of the same version, or `NONE`."""
    removed: Ints
    """The evaluations that the last `remove` removed, in order."""
    log: Ints
    """The changes that the last `remove` made to `live`, as triples (first position, stop, bytes)."""


def link(arrays: Arrays, evaluations: Ints) -> Links:
    """Make the `Links` of a schedule: the linked lists of all reads of each version, and of all evaluations of each op.
    `evaluations` is the schedule, as an array of op indices."""
    count = evaluations.size
    version_start = np.append(0, np.cumsum(np.diff(arrays.make_start)[evaluations]))
    read_start = np.append(0, np.cumsum(np.diff(arrays.read_start)[evaluations]))
    versions, reads = int(version_start[-1]), int(read_start[-1])
    links = Links(
        seconds=arrays.seconds[evaluations],
        before=np.full(count, NONE, np.int64),
        after=np.full(count, NONE, np.int64),
        alive=np.ones(count, np.bool_),
        queued=np.zeros(count, np.bool_),
        live=live_bytes(arrays, evaluations),
        version_start=version_start,
        maker=np.repeat(np.arange(count), np.diff(version_start)),
        size=np.zeros(versions, np.int64),
        forever=np.zeros(versions, np.bool_),
        head=np.full(versions, NONE, np.int64),
        tail=np.full(versions, NONE, np.int64),
        read_start=read_start,
        position=np.repeat(np.arange(count), np.diff(read_start)),
        version=np.zeros(reads, np.int64),
        previous=np.full(reads, NONE, np.int64),
        next=np.full(reads, NONE, np.int64),
        removed=np.zeros(count, np.int64),
        log=np.zeros(3 * (reads + 2 * versions), np.int64),
    )
    _fill(arrays, evaluations, np.full(arrays.seconds.size, NONE, np.int64), links)
    return links


@native
def _fill(arrays: Arrays, evaluations: Ints, latest: Ints, links: Links) -> None:
    """Fill the empty `links`. `latest` holds each op's latest evaluation and must be `NONE` for all ops at first."""
    for i in range(evaluations.size):
        op = evaluations[i]
        read = links.read_start[i]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            v = links.version_start[latest[arrays.producer[storage]]] + arrays.slot[storage]
            links.version[read] = v
            links.previous[read] = links.tail[v]
            if links.tail[v] == NONE:
                links.head[v] = read
            else:
                links.next[links.tail[v]] = read
            links.tail[v] = read
            read += 1
        v = links.version_start[i]
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            links.size[v] = arrays.size[arrays.makes[at]]
            links.forever[v] = latest[op] == NONE and arrays.kept[arrays.makes[at]]
            v += 1
        links.before[i] = latest[op]
        if latest[op] != NONE:
            links.after[latest[op]] = i
        latest[op] = i


@native_part
def death(links: Links, v: int) -> int:
    """The last position in the schedule at which version `v`, one of those in `links`, is live."""
    if links.forever[v]:
        return links.alive.size - 1
    return links.maker[v] if links.tail[v] == NONE else links.position[links.tail[v]]


@native_part
def remove(links: Links, i: int) -> tuple[int, int]:
    """Remove the recomputation `i`, then the recomputations that only it read.

    Returns how much of `links.removed` and of `links.log` was filled, which `put_back` needs.
    """
    links.removed[0] = i
    count, done, logged = 1, 0, 0
    while done < count:
        i = links.removed[done]
        done += 1
        logged = _hand_over(links, i, logged)
        links.alive[i] = False
        links.after[links.before[i]] = links.after[i]
        if links.after[i] != NONE:
            links.before[links.after[i]] = links.before[i]
        for read in range(links.read_start[i], links.read_start[i + 1]):
            v = links.version[read]
            died = death(links, v)
            previous, following = links.previous[read], links.next[read]
            if previous == NONE:
                links.head[v] = following
            else:
                links.next[previous] = following
            if following == NONE:
                links.tail[v] = previous
            else:
                links.previous[following] = previous
            logged = _add(links, logged, death(links, v) + 1, died + 1, -links.size[v])
            maker = links.maker[v]
            if not links.queued[maker] and _unread(links, maker):
                links.queued[maker] = True
                links.removed[count] = maker
                count += 1
    return count, logged


@native_part
def put_back(links: Links, count: int, logged: int) -> None:
    """Undo the last `remove`, step by step in reverse; the arguments are what `remove` returned."""
    for done in range(count - 1, -1, -1):
        i = links.removed[done]
        for read in range(links.read_start[i + 1] - 1, links.read_start[i] - 1, -1):
            previous, following, v = links.previous[read], links.next[read], links.version[read]
            if previous == NONE:
                links.head[v] = read
            else:
                links.next[previous] = read
            if following == NONE:
                links.tail[v] = read
            else:
                links.previous[following] = read
        if links.after[i] != NONE:
            links.before[links.after[i]] = i
        links.after[links.before[i]] = i
        links.alive[i] = True
        links.queued[i] = False
        _take_back_hand_over(links, i)
    for at in range(0, logged, 3):
        for position in range(links.log[at], links.log[at + 1]):
            links.live[position] -= links.log[at + 2]


@native_part
def _hand_over(links: Links, i: int, logged: int) -> int:
    """Let the readers of evaluation `i` read the previous evaluation of the same op; returns the log's new length."""
    w = links.version_start[links.before[i]]
    for v in range(links.version_start[i], links.version_start[i + 1]):
        died = death(links, w)
        logged = _add(links, logged, i, death(links, v) + 1, -links.size[v])
        read = links.head[v]
        if read != NONE:
            links.previous[read] = links.tail[w]
            if links.tail[w] == NONE:
                links.head[w] = read
            else:
                links.next[links.tail[w]] = read
            links.tail[w] = links.tail[v]
            while read != NONE:
                links.version[read] = w
                read = links.next[read]
            logged = _add(links, logged, died + 1, death(links, w) + 1, links.size[v])
        w += 1
    return logged


@native_part
def _take_back_hand_over(links: Links, i: int) -> None:
    """Undo `_hand_over(links, i, …)` except for the live bytes, which `put_back` restores from the log."""
    w = links.version_start[links.before[i]]
    for v in range(links.version_start[i], links.version_start[i + 1]):
        read = links.head[v]
        if read != NONE:
            links.tail[w] = links.previous[read]
            if links.tail[w] == NONE:
                links.head[w] = NONE
            else:
                links.next[links.tail[w]] = NONE
            links.previous[read] = NONE
            while read != NONE:
                links.version[read] = v
                read = links.next[read]
        w += 1


@native_part
def _unread(links: Links, i: int) -> bool:
    """Whether evaluation `i` is a recomputation and no read of any version that it makes is left."""
    if links.before[i] == NONE:
        return False
    for v in range(links.version_start[i], links.version_start[i + 1]):  # noqa: SIM110 (a loop compiles faster)
        if links.head[v] != NONE:
            return False
    return True


@native_part
def _add(links: Links, logged: int, start: int, stop: int, amount: int) -> int:
    """Add bytes to `live` from `start` up to, not including, `stop`, and log it; returns the log's new length."""
    if start >= stop:
        return logged
    for position in range(start, stop):
        links.live[position] += amount
    links.log[logged] = start
    links.log[logged + 1] = stop
    links.log[logged + 2] = amount
    return logged + 3

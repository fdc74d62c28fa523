"""The state of a replay, which makes the evaluations of a seed schedule again under a cap on memory: the values in
memory, when each is needed next, and the seconds to recompute it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints
from memopt.solver.native import native, native_part

NEVER = 2**62

# Places in `RepairState.scalars`.
USED, EVALUATED, NOW, PRESENT, AWAY, STAMP, LOOK = range(7)


class RepairState(NamedTuple):
    """The state of a replay; positions count the evaluations of the seed schedule from 0.

    Only the first entries of `present` and `away` are in use: `scalars` has their numbers. Calls of `look_ahead` are
    numbered from 1.
    """

    scalars: Ints
    """At the indices USED … LOOK: bytes in use, evaluations made, position in the seed, numbers of entries in
    `present` and `away`, and the numbers of the last traversal of the graph and of the last call of `look_ahead`."""
    evaluations: Ints
    """The ops evaluated so far, in order."""
    event_start: Ints
    events: Ints
    """Per storage, packed: 2 · position of each read in the seed, and 2 · position + 1 of each recomputation."""
    cursor: Ints
    """Per storage: the index of its first event that is not past."""
    present: Ints
    """The storages in memory."""
    place: Ints
    """Per storage: its index in `present`, or -1."""
    away: Ints
    """The storages that were made, are not in memory, and have events in the seed to come."""
    is_away: Flags
    """Per storage: whether it is in `away`."""
    copied: Flags
    """Per kept storage: whether a second version of it is in memory."""
    made: Flags
    """Per op: whether it was evaluated."""
    need: Ints
    """Per storage in memory: position of its next read, by the seed or by a recomputation, at the last `look_ahead`."""
    pinned: Ints
    """Per storage: the last call of `look_ahead` that found it used by an op on `stack`. A storage must not be evicted
    if this is the latest of all calls."""
    cost: Floats
    """Per storage: seconds to recompute it if it were evicted, its missing inputs included."""
    stale: Flags
    """Per storage: whether `cost` must be computed before it is used."""
    visited: Ints
    """Per op: the number of the last traversal that came to it."""
    op_need: Ints
    """Per op: the position before which it must be recomputed. Valid only where `op_look` of the op, the call of
    `look_ahead` that set it, is the latest call."""
    op_look: Ints
    pending: Ints
    """Scratch space for traversals."""
    stack: Ints
    """The op that is evaluated next, and ops whose values it misses."""
    candidates: Ints
    """A heap of storages that may be evicted, with `scores`."""
    scores: Floats
    bytes_power: Floats
    """Per storage: its bytes to the power p, divided by the noise."""
    distance_power: Floats
    """Per number of evaluations: that number to the power a."""


def start_replay(arrays: Arrays, seed: Ints, most: int, bytes_power: Floats, distance_power: Floats) -> RepairState:
    """The state before the first evaluation of a replay of `seed`, with room for `most` evaluations.

    `bytes_power` and `distance_power` become the fields of `RepairState` that have these names; the second has an entry
    for each number of evaluations from 0 to `seed.size + 1`.
    """
    ops, storages = arrays.seconds.size, arrays.size.size
    reads, makes = np.diff(arrays.read_start), np.diff(arrays.make_start)
    event_start = np.zeros(storages + 1, np.int64)
    replay = RepairState(
        scalars=np.zeros(7, np.int64),
        evaluations=np.zeros(most, np.int64),
        event_start=event_start,
        events=np.zeros(int(reads[seed].sum() + makes[seed].sum()), np.int64),
        cursor=np.zeros(storages, np.int64),
        present=np.zeros(storages, np.int64),
        place=np.full(storages, -1, np.int64),
        away=np.zeros(storages, np.int64),
        is_away=np.zeros(storages, np.bool_),
        copied=np.zeros(storages, np.bool_),
        made=np.zeros(ops, np.bool_),
        need=np.zeros(storages, np.int64),
        pinned=np.zeros(storages, np.int64),
        cost=np.zeros(storages),
        stale=np.ones(storages, np.bool_),
        visited=np.zeros(ops, np.int64),
        op_need=np.zeros(ops, np.int64),
        op_look=np.zeros(ops, np.int64),
        pending=np.zeros(storages + ops, np.int64),
        stack=np.zeros(ops + 1, np.int64),
        candidates=np.zeros(storages, np.int64),
        scores=np.zeros(storages),
        bytes_power=bytes_power,
        distance_power=distance_power,
    )
    replay.scalars[USED] = arrays.resident_bytes
    _list_events(arrays, seed, replay)
    return replay


@native
def _list_events(arrays: Arrays, seed: Ints, replay: RepairState) -> None:
    """Fill `events` and `event_start` with each storage's reads and recomputations in the order of the seed."""
    fill, start, made = replay.cursor, replay.event_start, replay.made
    for counting in (True, False):
        for position in range(seed.size):
            op = seed[position]
            for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
                storage = arrays.reads[at]
                if not counting:
                    replay.events[start[storage] + fill[storage]] = 2 * position
                fill[storage] += 1
            if made[op]:
                for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
                    storage = arrays.makes[at]
                    if not counting:
                        replay.events[start[storage] + fill[storage]] = 2 * position + 1
                    fill[storage] += 1
            made[op] = True
        for op in range(made.size):
            made[op] = False
        for storage in range(fill.size):
            start[storage + 1] = start[storage] + fill[storage]
            fill[storage] = 0
    for storage in range(fill.size):
        replay.cursor[storage] = start[storage]


@native_part
def evaluate(arrays: Arrays, replay: RepairState, op: int) -> None:
    """Record an evaluation of `op`: the storages that it makes are in memory then. Its inputs must be in memory."""
    scalars = replay.scalars
    replay.evaluations[scalars[EVALUATED]] = op
    scalars[EVALUATED] += 1
    replay.made[op] = True
    for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
        storage = arrays.makes[at]
        if replay.place[storage] < 0:
            replay.place[storage] = scalars[PRESENT]
            replay.present[scalars[PRESENT]] = storage
            scalars[PRESENT] += 1
            scalars[USED] += arrays.size[storage]
            _spread_staleness(arrays, replay, storage)
        elif arrays.kept[storage] and not replay.copied[storage]:
            replay.copied[storage] = True
            scalars[USED] += arrays.size[storage]


@native_part
def drop(arrays: Arrays, replay: RepairState, storage: int) -> None:
    """Free the memory of `storage`, which must be present."""
    scalars = replay.scalars
    scalars[PRESENT] -= 1
    last = replay.present[scalars[PRESENT]]
    replay.present[replay.place[storage]] = last
    replay.place[last] = replay.place[storage]
    replay.place[storage] = -1
    scalars[USED] -= arrays.size[storage]
    if not replay.is_away[storage]:
        replay.is_away[storage] = True
        replay.away[scalars[AWAY]] = storage
        scalars[AWAY] += 1
    _spread_staleness(arrays, replay, storage)


@native_part
def _spread_staleness(arrays: Arrays, replay: RepairState, storage: int) -> None:
    """Mark the costs that depend on whether `storage` is in memory, also through other missing storages, as stale."""
    scalars, pending = replay.scalars, replay.pending
    scalars[STAMP] += 1
    pending[0] = storage
    count = 1
    while count > 0:
        count -= 1
        changed = pending[count]
        for at in range(arrays.reader_start[changed], arrays.reader_start[changed + 1]):
            op = arrays.readers[at]
            if not replay.made[op] or replay.visited[op] == scalars[STAMP]:
                continue
            replay.visited[op] = scalars[STAMP]
            for make in range(arrays.make_start[op], arrays.make_start[op + 1]):
                made = arrays.makes[make]
                replay.stale[made] = True
                if replay.place[made] < 0:
                    pending[count] = made
                    count += 1


@native_part
def cost(arrays: Arrays, replay: RepairState, storage: int) -> float:
    """Seconds to recompute `storage` and all inputs for it that are not in memory; infinite if one cannot be
    recomputed."""
    if not replay.stale[storage]:
        return replay.cost[storage]
    scalars, pending = replay.scalars, replay.pending
    scalars[STAMP] += 1
    total = 1e-12  # never zero: bytes and distance still decide among ops that cost nothing
    pending[0] = arrays.producer[storage]
    replay.visited[pending[0]] = scalars[STAMP]
    count = 1
    while count > 0:
        count -= 1
        op = pending[count]
        if not arrays.repeatable[op]:
            total = np.inf
            break
        total += arrays.seconds[op]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            producer = arrays.producer[arrays.reads[at]]
            if replay.place[arrays.reads[at]] < 0 and replay.visited[producer] != scalars[STAMP]:
                replay.visited[producer] = scalars[STAMP]
                pending[count] = producer
                count += 1
    replay.cost[storage] = total
    replay.stale[storage] = False
    return total

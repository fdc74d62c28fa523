"""When each value of a replay is read next: by the seed schedule, or by a recomputation that must come before that."""

from __future__ import annotations

from memopt.solver.arrays import Arrays
from memopt.solver.native import native_part
from memopt.solver.replay import AWAY, LOOK, NEVER, NOW, PRESENT, Replay


@native_part
def look_ahead(arrays: Arrays, replay: Replay, depth: int) -> None:
    """Set `need` of the storages in memory, and pin those that the `depth` ops on the stack use."""
    scalars, need = replay.scalars, replay.need
    scalars[LOOK] += 1
    for at in range(scalars[PRESENT]):
        storage = replay.present[at]
        need[storage] = _next_read(replay, storage)
    last = _look_at_away(arrays, replay)
    for level in range(depth):
        op = replay.stack[level]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            if replay.place[storage] < 0:
                last = max(last, _need_op(replay, arrays.producer[storage], scalars[NOW]))
            else:
                need[storage] = scalars[NOW]
                replay.pinned[storage] = scalars[LOOK]
    op = replay.stack[depth - 1]
    for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
        replay.pinned[arrays.makes[at]] = scalars[LOOK]
    _pass_need_on(arrays, replay, last)


@native_part
def _look_at_away(arrays: Arrays, replay: Replay) -> int:
    """Mark the ops that must recompute evicted storages that the seed still reads; returns the last one, or -1."""
    scalars = replay.scalars
    last = -1
    at = 0
    while at < scalars[AWAY]:
        storage = replay.away[at]
        soonest = _next_read(replay, storage)
        if replay.place[storage] >= 0 or replay.cursor[storage] == replay.event_start[storage + 1]:
            replay.is_away[storage] = False
            scalars[AWAY] -= 1
            replay.away[at] = replay.away[scalars[AWAY]]
            continue
        if soonest < NEVER:
            last = max(last, _need_op(replay, arrays.producer[storage], soonest))
        at += 1
    return last


@native_part
def _next_read(replay: Replay, storage: int) -> int:
    """Position of the seed's next read of the storage's current version; `NEVER` if the seed recomputes it first."""
    at, stop = replay.cursor[storage], replay.event_start[storage + 1]
    while at < stop and replay.events[at] < 2 * replay.scalars[NOW]:
        at += 1
    replay.cursor[storage] = at
    if at < stop and replay.events[at] % 2 == 0:
        return replay.events[at] // 2
    return NEVER


@native_part
def _need_op(replay: Replay, op: int, soonest: int) -> int:
    """Mark that the op must be recomputed by position `soonest` at the latest; returns the op."""
    if replay.op_look[op] != replay.scalars[LOOK]:
        replay.op_look[op] = replay.scalars[LOOK]
        replay.op_need[op] = soonest
    else:
        replay.op_need[op] = min(replay.op_need[op], soonest)
    return op


@native_part
def need_again(arrays: Arrays, replay: Replay, storage: int) -> None:
    """After the eviction of `storage`: the inputs of its recomputation, missing ones included, are needed as soon as
    the storage was."""
    pending = replay.pending
    pending[0] = _need_op(replay, arrays.producer[storage], replay.need[storage])
    count = 1
    while count > 0:
        count -= 1
        op = pending[count]
        soonest = replay.op_need[op]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            read = arrays.reads[at]
            if replay.place[read] >= 0:
                replay.need[read] = min(replay.need[read], soonest)
                continue
            producer = arrays.producer[read]
            if replay.op_look[producer] != replay.scalars[LOOK] or replay.op_need[producer] > soonest:
                replay.op_look[producer] = replay.scalars[LOOK]
                replay.op_need[producer] = soonest
                pending[count] = producer
                count += 1


@native_part
def _pass_need_on(arrays: Arrays, replay: Replay, last: int) -> None:
    """From op `last` back to the first: the storages that an op to recompute reads are needed as soon as the op is."""
    scalars = replay.scalars
    for op in range(last, -1, -1):
        if replay.op_look[op] != scalars[LOOK]:
            continue
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            if replay.place[storage] < 0:
                _need_op(replay, arrays.producer[storage], replay.op_need[op])
            else:
                replay.need[storage] = min(replay.need[storage], replay.op_need[op])

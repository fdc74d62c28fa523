"""Replays a schedule under a hard cap: evicts what is cheapest to have again, and recomputes it when it is read.

The replay makes every op's first evaluation in order and asks the seed schedule when each value is read next and when
the seed lets it go. Where memory runs out it first drops what nothing will read, then evicts the value of the least

    seconds to recompute it, missing inputs included  /  (bytes^p · evaluations until its next read^a)

as in dynamic tensor rematerialisation (Kirisame et al., 2021), but with the future known. An evicted value's inputs are
needed from then on, until it is recomputed. Values evicted in the forward, or several times, come out of the same rule.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Floats, Ints
from memopt.solver.liveness import peak_bytes, remove_dead
from memopt.solver.native import native

_NEVER = 2**62
_USED, _COUNT, _STAMP, _NOW = 0, 1, 2, 3


class _Replay(NamedTuple):
    """State of a replay; positions are the seed's."""

    scalars: Ints
    """Bytes in use, evaluations so far, last visit stamp, position in the seed."""
    evaluations: Ints
    event_start: Ints
    events: Ints
    """Per storage, in the seed: 2 · position of a read, or 2 · position + 1 of its making again."""
    cursor: Ints
    present: Flags
    copied: Flags
    """Per kept storage: a second version of it is alive."""
    made: Flags
    """Per op: evaluated once."""
    need: Ints
    """Per storage: position of its next read, also by what must be recomputed; as of the last look."""
    cost: Floats
    """Per storage: seconds to have it again if it is evicted, inputs that are missing now included."""
    stale: Flags
    pinned: Ints
    visited: Ints
    pending: Ints
    stack: Ints
    bytes_power: Floats
    distance_power: Floats


def repair(
    arrays: Arrays,
    seed: Ints,
    cap_bytes: int,
    bytes_exponent: float = 1.0,
    distance_exponent: float = 1.0,
    noise: Floats | None = None,
) -> Ints | None:
    """A schedule with a peak of at most `cap_bytes`, close to the `seed` schedule, or None where the replay gets stuck.

    `noise` multiplies each storage's score (for a local search). The replay gives up when it has made several times as
    many evaluations as there are ops, so it always ends.
    """
    ops = arrays.seconds.size
    most = 6 * ops + 4 * seed.size + 100
    bytes_power = np.maximum(arrays.size, 1).astype(np.float64) ** bytes_exponent
    if noise is not None:
        bytes_power = bytes_power / noise
    distance_power = np.arange(seed.size + 2, dtype=np.float64) ** distance_exponent
    evaluations = _replay(arrays, seed, cap_bytes, bytes_power, distance_power, most)
    if evaluations.size == 0:
        return None
    evaluations = remove_dead(arrays, evaluations)
    return evaluations if peak_bytes(arrays, evaluations) <= cap_bytes else None


@native
def _replay(arrays: Arrays, seed: Ints, cap_bytes: int, bytes_power: Floats, distance_power: Floats, most: int) -> Ints:
    """The evaluations, or none of them where the replay is stuck."""
    replay = _start(arrays, seed, bytes_power, distance_power, most)
    for position in range(seed.size):
        if replay.made[seed[position]]:
            continue
        replay.scalars[_NOW] = position
        if not _evaluate_with_inputs(arrays, replay, seed[position], cap_bytes):
            return replay.evaluations[:0]
    return replay.evaluations[: replay.scalars[_COUNT]]


@native
def _start(arrays: Arrays, seed: Ints, bytes_power: Floats, distance_power: Floats, most: int) -> _Replay:
    storages, ops = arrays.size.size, arrays.seconds.size
    event_start = np.zeros(storages + 1, np.int64)
    seen = np.zeros(ops, np.bool_)
    for op in seed:
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            event_start[arrays.reads[at] + 1] += 1
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            event_start[arrays.makes[at] + 1] += seen[op]
        seen[op] = True
    event_start = np.cumsum(event_start)
    events = np.zeros(event_start[storages], np.int64)
    fill = event_start[:-1].copy()
    seen[:] = False
    for position in range(seed.size):
        op = seed[position]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            events[fill[storage]] = 2 * position
            fill[storage] += 1
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            if seen[op]:
                storage = arrays.makes[at]
                events[fill[storage]] = 2 * position + 1
                fill[storage] += 1
        seen[op] = True
    scalars = np.zeros(4, np.int64)
    scalars[_USED] = arrays.resident_bytes
    return _Replay(
        scalars, np.zeros(most, np.int64), event_start, events, event_start[:-1].copy(),
        np.zeros(storages, np.bool_), np.zeros(storages, np.bool_), np.zeros(ops, np.bool_),
        np.full(storages, _NEVER, np.int64), np.zeros(storages), np.ones(storages, np.bool_),
        np.zeros(storages, np.int64), np.zeros(ops, np.int64), np.zeros(storages + ops, np.int64),
        np.zeros(ops + 1, np.int64),
        bytes_power, distance_power,
    )  # fmt: skip


@native
def _evaluate_with_inputs(arrays: Arrays, replay: _Replay, op: int, cap_bytes: int) -> bool:
    """Evaluate `op`, before it whatever it misses. False where the cap or the number of evaluations forbids it."""
    stack, present = replay.stack, replay.present
    stack[0] = op
    depth = 1
    while depth > 0:
        op = stack[depth - 1]
        missing = -1
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            if not present[arrays.reads[at]]:
                missing = arrays.reads[at]
                break
        if missing >= 0:
            producer = arrays.producer[missing]
            if not arrays.repeatable[producer] or depth == stack.size:
                return False
            stack[depth] = producer
            depth += 1
            continue
        extra = arrays.workspace[op]
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            storage = arrays.makes[at]
            if not present[storage] or (arrays.kept[storage] and not replay.copied[storage]):
                extra += arrays.size[storage]
        if replay.scalars[_USED] + extra > cap_bytes and not _make_room(arrays, replay, depth, cap_bytes - extra):
            return False
        if replay.scalars[_COUNT] == replay.evaluations.size:
            return False
        _evaluate(arrays, replay, op)
        depth -= 1
    return True


@native
def _evaluate(arrays: Arrays, replay: _Replay, op: int) -> None:
    scalars = replay.scalars
    replay.evaluations[scalars[_COUNT]] = op
    scalars[_COUNT] += 1
    for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
        storage = arrays.makes[at]
        if not replay.present[storage]:
            replay.present[storage] = True
            scalars[_USED] += arrays.size[storage]
            _spread_staleness(arrays, replay, storage)
        elif arrays.kept[storage] and not replay.copied[storage]:
            replay.copied[storage] = True
            scalars[_USED] += arrays.size[storage]
    replay.made[op] = True


@native
def _spread_staleness(arrays: Arrays, replay: _Replay, storage: int) -> None:
    """The storage came or went: mark the costs that count it, through whatever is missing."""
    scalars, pending = replay.scalars, replay.pending
    scalars[_STAMP] += 1
    pending[0] = storage
    count = 1
    replay.stale[storage] = True
    while count > 0:
        count -= 1
        changed = pending[count]
        for at in range(arrays.reader_start[changed], arrays.reader_start[changed + 1]):
            op = arrays.readers[at]
            if not replay.made[op] or replay.visited[op] == scalars[_STAMP]:
                continue
            replay.visited[op] = scalars[_STAMP]
            for make in range(arrays.make_start[op], arrays.make_start[op + 1]):
                made = arrays.makes[make]
                replay.stale[made] = True
                if not replay.present[made]:
                    pending[count] = made
                    count += 1


@native
def _cost(arrays: Arrays, replay: _Replay, storage: int) -> float:
    """Seconds to have `storage` again, infinite where something that it misses cannot be recomputed."""
    if not replay.stale[storage]:
        return replay.cost[storage]
    scalars, pending = replay.scalars, replay.pending
    scalars[_STAMP] += 1
    total = 1e-12  # never zero: bytes and distance still decide among ops that cost nothing
    pending[0] = arrays.producer[storage]
    replay.visited[pending[0]] = scalars[_STAMP]
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
            if not replay.present[arrays.reads[at]] and replay.visited[producer] != scalars[_STAMP]:
                replay.visited[producer] = scalars[_STAMP]
                pending[count] = producer
                count += 1
    replay.cost[storage] = total
    replay.stale[storage] = False
    return total


@native
def _look_ahead(arrays: Arrays, replay: _Replay, depth: int) -> None:
    """Fill `need` and pin what the ops on the stack read."""
    now = replay.scalars[_NOW]
    need, present = replay.need, replay.present
    last_missing = -1
    for storage in range(arrays.size.size):
        at = replay.cursor[storage]
        stop = replay.event_start[storage + 1]
        while at < stop and replay.events[at] < 2 * now:
            at += 1
        replay.cursor[storage] = at
        is_read = at < stop and replay.events[at] % 2 == 0
        need[storage] = replay.events[at] // 2 if is_read else _NEVER
        if is_read and not present[storage] and replay.made[arrays.producer[storage]]:
            last_missing = max(last_missing, arrays.producer[storage])
    replay.scalars[_STAMP] += 1
    for level in range(depth):
        op = replay.stack[level]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            storage = arrays.reads[at]
            need[storage] = now
            replay.pinned[storage] = replay.scalars[_STAMP]
            if not present[storage]:
                last_missing = max(last_missing, arrays.producer[storage])
    op = replay.stack[depth - 1]
    for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
        replay.pinned[arrays.makes[at]] = replay.scalars[_STAMP]
    for op in range(last_missing, -1, -1):
        _pass_need_on(arrays, replay, op)


@native
def _pass_need_on(arrays: Arrays, replay: _Replay, op: int) -> None:
    """What `op` reads is needed as soon as what it makes and is missing."""
    soonest = _NEVER
    if not replay.made[op]:
        return
    for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
        if not replay.present[arrays.makes[at]]:
            soonest = min(soonest, replay.need[arrays.makes[at]])
    if soonest < _NEVER:
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            replay.need[arrays.reads[at]] = min(replay.need[arrays.reads[at]], soonest)


@native
def _make_room(arrays: Arrays, replay: _Replay, depth: int, allowed_bytes: int) -> bool:
    """Drop what nothing will read, then evict by score, until `allowed_bytes` are in use at most."""
    _look_ahead(arrays, replay, depth)
    scalars, present, kept, need = replay.scalars, replay.present, arrays.kept, replay.need
    pin = scalars[_STAMP]
    storages = arrays.size.size
    candidates = np.zeros(storages, np.int64)
    scores = np.zeros(storages)
    count = 0
    for storage in range(storages):
        if not present[storage] or replay.pinned[storage] == pin:
            continue
        if kept[storage]:
            if replay.copied[storage] and need[storage] == _NEVER:
                replay.copied[storage] = False
                scalars[_USED] -= arrays.size[storage]
        elif need[storage] == _NEVER:
            _drop(arrays, replay, storage)
        elif arrays.repeatable[arrays.producer[storage]] and arrays.size[storage] > 0:
            candidates[count] = storage
            count += 1
    if scalars[_USED] <= allowed_bytes:
        return True
    for at in range(count):
        scores[at] = _score(arrays, replay, candidates[at])
    while scalars[_USED] > allowed_bytes:
        best = -1
        while count > 0:
            best = int(np.argmin(scores[:count]))
            score = _score(arrays, replay, candidates[best])
            if score <= scores[best]:
                break
            scores[best] = score  # evictions only raise the scores of what remains
        if best < 0 or scores[best] == np.inf:
            return False
        storage = candidates[best]
        count -= 1
        candidates[best], scores[best] = candidates[count], scores[count]
        _drop(arrays, replay, storage)
        for op in range(arrays.producer[storage], -1, -1):
            _pass_need_on(arrays, replay, op)
    return True


@native
def _score(arrays: Arrays, replay: _Replay, storage: int) -> float:
    distance = max(replay.need[storage] - replay.scalars[_NOW], 0) + 1
    return _cost(arrays, replay, storage) / (replay.bytes_power[storage] * replay.distance_power[distance])


@native
def _drop(arrays: Arrays, replay: _Replay, storage: int) -> None:
    replay.present[storage] = False
    replay.scalars[_USED] -= arrays.size[storage]
    _spread_staleness(arrays, replay, storage)

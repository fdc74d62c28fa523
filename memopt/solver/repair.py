"""Replays a schedule under a hard cap: evicts the values that are cheapest to recompute, and recomputes them when read.

The replay makes every op's first evaluation in order, and looks up in the seed schedule when each value is read next
and when the seed frees it. When memory runs out it first frees values without further reads, then evicts the value with
the smallest

seconds to recompute it, missing inputs included  /  (bytes^p · evaluations until its next read^a)

as in dynamic tensor rematerialisation (Kirisame et al., 2021), but with the future known. The inputs of an evicted
value are needed until it is recomputed. The same rule covers values evicted in the forward, or several times.

The next read of each value is found by looking ahead: it is the next one in the seed schedule, or that of a
recomputation which must come before it.
"""

from __future__ import annotations

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints, peak_bytes, remove_dead
from memopt.solver.native import native, native_part
from memopt.solver.replay import (
    AWAY,
    EVALUATED,
    LOOK,
    NEVER,
    NOW,
    PRESENT,
    USED,
    RepairState,
    cost,
    drop,
    evaluate,
    start_replay,
)


@native_part
def heapify(items: Ints, scores: Floats, count: int) -> None:
    """Reorder the first `count` entries of both arrays alike into a heap, the smallest score at index 0."""
    for at in range(count // 2 - 1, -1, -1):
        sift_down(items, scores, at, count)


@native_part
def sift_down(items: Ints, scores: Floats, at: int, count: int) -> None:
    """Move the item and the score at index `at` down to their place in a heap of `count` entries that is otherwise in
    order."""
    item, score = items[at], scores[at]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and scores[child + 1] < scores[child]:
            child += 1
        if scores[child] >= score:
            break
        items[at], scores[at] = items[child], scores[child]
        at = child
    items[at], scores[at] = item, score


@native_part
def look_ahead(arrays: Arrays, replay: RepairState, depth: int) -> None:
    """For the storages in memory, set `need`, the position of the next read. Also protect from eviction (`pinned`) the
    storages that the first `depth` ops of `replay.stack` read, and those that the last of these ops makes."""
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
def _look_at_away(arrays: Arrays, replay: RepairState) -> int:
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
def _next_read(replay: RepairState, storage: int) -> int:
    """Position of the seed's next read of the storage's current version; `NEVER` if the seed recomputes it first."""
    at, stop = replay.cursor[storage], replay.event_start[storage + 1]
    while at < stop and replay.events[at] < 2 * replay.scalars[NOW]:
        at += 1
    replay.cursor[storage] = at
    if at < stop and replay.events[at] % 2 == 0:
        return replay.events[at] // 2
    return NEVER


@native_part
def _need_op(replay: RepairState, op: int, soonest: int) -> int:
    """Mark that the op must be recomputed by position `soonest` at the latest; returns the op."""
    if replay.op_look[op] != replay.scalars[LOOK]:
        replay.op_look[op] = replay.scalars[LOOK]
        replay.op_need[op] = soonest
    else:
        replay.op_need[op] = min(replay.op_need[op], soonest)
    return op


@native_part
def need_again(arrays: Arrays, replay: RepairState, storage: int) -> None:
    """After the eviction of `storage`: mark that all inputs from which it will be recomputed are needed no later than
    the storage itself. Where an input is not in memory, the same holds for the inputs of its own recomputation."""
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
                pending[count] = _need_op(replay, producer, soonest)
                count += 1


@native_part
def _pass_need_on(arrays: Arrays, replay: RepairState, last: int) -> None:
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


# Evictions free this share of the cap beyond the need of the next op: three times as fast, and plans are as good.
_SLACK = 0.01


def repair(
    arrays: Arrays,
    seed: Ints,
    cap_bytes: int,
    bytes_exponent: float = 1.0,
    distance_exponent: float = 1.0,
    noise: Floats | None = None,
) -> tuple[Ints | None, int]:
    """A schedule with a peak of at most `cap_bytes`, close to the `seed` schedule, or None if none was found; and
    the number of evaluations that the replay made, a measure of its work (also those that the schedule leaves out).

    `bytes_exponent` and `distance_exponent` are p and a of the module's rule; `noise` multiplies each storage's score
    (for a local search). The replay gives up after several times as many evaluations as there are ops, so it always
    ends.
    """
    most = 6 * arrays.seconds.size + 4 * seed.size + 100
    bytes_power = np.maximum(arrays.size, 1).astype(np.float64) ** bytes_exponent
    if noise is not None:
        bytes_power = bytes_power / noise
    distance_power = np.arange(seed.size + 2, dtype=np.float64) ** distance_exponent
    replay = start_replay(arrays, seed, most, bytes_power, distance_power)
    slack_bytes = int(_SLACK * (cap_bytes - arrays.resident_bytes))
    whole = _replay_all(arrays, replay, seed, cap_bytes, slack_bytes)
    spent = int(replay.scalars[EVALUATED])
    evaluations = remove_dead(arrays, replay.evaluations[:spent]) if whole else None
    if evaluations is not None and peak_bytes(arrays, evaluations) > cap_bytes:
        evaluations = None
    return evaluations, spent


@native
def _replay_all(arrays: Arrays, replay: RepairState, seed: Ints, cap_bytes: int, slack_bytes: int) -> bool:
    """Make every op's first evaluation in the seed's order; returns False if one cannot be made within the cap."""
    for position in range(seed.size):
        if not replay.made[seed[position]]:
            replay.scalars[NOW] = position
            if not _evaluate_with_inputs(arrays, replay, seed[position], cap_bytes, slack_bytes):
                return False
    return True


@native_part
def _evaluate_with_inputs(arrays: Arrays, replay: RepairState, op: int, cap_bytes: int, slack_bytes: int) -> bool:
    """Recompute the inputs that `op` misses and evaluate it; returns False if the cap or the work limit forbids it."""
    stack = replay.stack
    stack[0] = op
    depth = 1
    while depth > 0:
        op = stack[depth - 1]
        missing = -1
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            if replay.place[arrays.reads[at]] < 0:
                missing = arrays.producer[arrays.reads[at]]
                break
        if missing >= 0:
            if not arrays.repeatable[missing] or depth == stack.size:
                return False
            stack[depth] = missing
            depth += 1
            continue
        extra = arrays.workspace[op]
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            storage = arrays.makes[at]
            if replay.place[storage] < 0 or (arrays.kept[storage] and not replay.copied[storage]):
                extra += arrays.size[storage]
        allowed = cap_bytes - extra
        if replay.scalars[USED] > allowed and not _make_room(arrays, replay, depth, allowed, slack_bytes):
            return False
        if replay.scalars[EVALUATED] == replay.evaluations.size:
            return False
        evaluate(arrays, replay, op)
        depth -= 1
    return True


@native_part
def _make_room(arrays: Arrays, replay: RepairState, depth: int, allowed_bytes: int, slack_bytes: int) -> bool:
    """Free values without further reads, then evict by score, until at most `allowed_bytes` are in use.

    Returns whether that succeeded. Evictions go on until `slack_bytes`, and at most twice that, are free, so that the
    next ops find room.
    """
    look_ahead(arrays, replay, depth)
    scalars, candidates, scores = replay.scalars, replay.candidates, replay.scores
    count = _drop_unneeded(arrays, replay)
    if scalars[USED] <= allowed_bytes:
        return True
    for at in range(count):
        scores[at] = _score(arrays, replay, candidates[at])
    heapify(candidates, scores, count)
    while scalars[USED] > allowed_bytes - slack_bytes:
        fits = scalars[USED] <= allowed_bytes
        if not _least_first(arrays, replay, count) or scores[0] == np.inf:
            return fits
        storage = candidates[0]
        if fits and scalars[USED] - arrays.size[storage] < allowed_bytes - 2 * slack_bytes:
            return True
        count -= 1
        candidates[0], scores[0] = candidates[count], scores[count]
        sift_down(candidates, scores, 0, count)
        drop(arrays, replay, storage)
        need_again(arrays, replay, storage)
    return True


@native_part
def _least_first(arrays: Arrays, replay: RepairState, count: int) -> bool:
    """Bring the candidate with the smallest current score to the front of the heap; returns False without candidates.

    Evictions only raise the scores of others, so the front candidate is the smallest once its score is up to date.
    """
    candidates, scores = replay.candidates, replay.scores
    while count > 0:
        score = _score(arrays, replay, candidates[0])
        if score <= scores[0]:
            return True
        scores[0] = score
        sift_down(candidates, scores, 0, count)
    return False


@native_part
def _drop_unneeded(arrays: Arrays, replay: RepairState) -> int:
    """Free values without further reads, and list those that may be evicted; returns the number of the latter."""
    scalars = replay.scalars
    count = 0
    for at in range(scalars[PRESENT] - 1, -1, -1):
        storage = replay.present[at]
        if replay.pinned[storage] == scalars[LOOK]:
            continue
        if arrays.kept[storage]:
            if replay.copied[storage] and replay.need[storage] == NEVER:
                replay.copied[storage] = False
                scalars[USED] -= arrays.size[storage]
        elif replay.need[storage] == NEVER:
            drop(arrays, replay, storage)
        elif arrays.repeatable[arrays.producer[storage]] and arrays.size[storage] > 0:
            replay.candidates[count] = storage
            count += 1
    return count


@native_part
def _score(arrays: Arrays, replay: RepairState, storage: int) -> float:
    """The score of evicting `storage` by the module's rule; the smallest is evicted first."""
    distance = max(replay.need[storage] - replay.scalars[NOW], 0) + 1
    return cost(arrays, replay, storage) / (replay.bytes_power[storage] * replay.distance_power[distance])

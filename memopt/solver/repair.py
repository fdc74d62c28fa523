"""Replays a schedule under a hard cap: evicts the values that are cheapest to recompute, and recomputes them when read.

The replay makes every op's first evaluation in order, and looks up in the seed schedule when each value is read next
and when the seed frees it. When memory runs out it first frees values without further reads, then evicts the value with
the smallest

    seconds to recompute it, missing inputs included  /  (bytes^p · evaluations until its next read^a)

as in dynamic tensor rematerialisation (Kirisame et al., 2021), but with the future known. The inputs of an evicted
value are needed until it is recomputed. The same rule covers values evicted in the forward, or several times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints
from memopt.solver.liveness import peak_bytes, remove_dead
from memopt.solver.look_ahead import look_ahead, need_again
from memopt.solver.min_heap import heapify, sift_down
from memopt.solver.native import native, native_part
from memopt.solver.replay import (
    EVALUATED,
    LOOK,
    NEVER,
    NOW,
    PRESENT,
    USED,
    Replay,
    cost,
    drop,
    evaluate,
    start_replay,
)

# Evictions free this share of the cap beyond the need of the next op: three times as fast, and plans are as good.
_SLACK = 0.01


class Repaired(NamedTuple):
    """The outcome of a replay."""

    evaluations: Ints | None
    """The schedule, which is within the cap; None if the replay did not reach the end."""
    spent: int
    """Evaluations that the replay made, also those that nothing reads: the work that it took."""


def repair(
    arrays: Arrays,
    seed: Ints,
    cap_bytes: int,
    bytes_exponent: float = 1.0,
    distance_exponent: float = 1.0,
    noise: Floats | None = None,
) -> Repaired:
    """A schedule with a peak of at most `cap_bytes`, close to the `seed` schedule.

    The exponents are p and a of the rule above; `noise` multiplies each storage's score (for a local search). The
    replay gives up after several times as many evaluations as there are ops, so it always ends.
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
    return Repaired(evaluations, spent)


@native
def _replay_all(arrays: Arrays, replay: Replay, seed: Ints, cap_bytes: int, slack_bytes: int) -> bool:
    """Make every op's first evaluation in the seed's order; returns False if one cannot be made within the cap."""
    for position in range(seed.size):
        if not replay.made[seed[position]]:
            replay.scalars[NOW] = position
            if not _evaluate_with_inputs(arrays, replay, seed[position], cap_bytes, slack_bytes):
                return False
    return True


@native_part
def _evaluate_with_inputs(arrays: Arrays, replay: Replay, op: int, cap_bytes: int, slack_bytes: int) -> bool:
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
def _make_room(arrays: Arrays, replay: Replay, depth: int, allowed_bytes: int, slack_bytes: int) -> bool:
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
def _least_first(arrays: Arrays, replay: Replay, count: int) -> bool:
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
def _drop_unneeded(arrays: Arrays, replay: Replay) -> int:
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
def _score(arrays: Arrays, replay: Replay, storage: int) -> float:
    """The score of evicting `storage` by the rule above; the smallest is evicted first."""
    distance = max(replay.need[storage] - replay.scalars[NOW], 0) + 1
    return cost(arrays, replay, storage) / (replay.bytes_power[storage] * replay.distance_power[distance])

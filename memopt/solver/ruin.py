"""A step of the local search: frees a few held values and recomputes them before their next reads.

A polish then uses the freed memory, perhaps for other values that are worth more: "ruin and recreate" (Schrimpf et al.,
2000) at one place of the schedule, while a repair under a smaller cap changes all of it.
"""

from __future__ import annotations

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.native import native

_UNKNOWN, _NEVER = -2, -1


def ruin(arrays: Arrays, evaluations: Ints, draw: np.random.Generator) -> Ints:
    """The schedule with up to four values recomputed before their next reads.

    They are drawn at random from the values that are held across one random position of the backward.
    """
    backward = np.flatnonzero(evaluations >= arrays.forward_ops)
    if backward.size == 0:
        return evaluations
    position = int(backward[int(draw.integers(backward.size))])
    reads = next_reads(arrays, evaluations, position)
    can_go = arrays.repeatable[arrays.producer] & ~arrays.kept & (arrays.size > 0)
    droppable = np.flatnonzero((reads > position) & can_go)
    if droppable.size == 0:
        return evaluations
    weight = arrays.size[droppable] * (reads[droppable] - position) ** 0.5
    count = min(int(draw.integers(1, 5)), droppable.size)
    chosen = draw.choice(droppable, count, replace=False, p=weight / weight.sum())
    for storage in sorted(chosen.tolist(), key=lambda s: -int(reads[s])):
        at = int(reads[storage])
        evaluations = np.insert(evaluations, at, _ops_to_recompute(arrays, evaluations, storage, at))
    return evaluations


def _ops_to_recompute(arrays: Arrays, evaluations: Ints, storage: int, at: int) -> list[int]:
    """The ops that recompute `storage` right before position `at` from the values in memory there, in order."""
    reads = next_reads(arrays, evaluations, at)
    ops = {int(arrays.producer[storage])}
    pending = list(ops)
    while pending:
        op = pending.pop()
        for read in arrays.reads[arrays.read_start[op] : arrays.read_start[op + 1]].tolist():
            producer = int(arrays.producer[read])
            if reads[read] < 0 and not arrays.kept[read] and arrays.repeatable[producer] and producer not in ops:
                ops.add(producer)
                pending.append(producer)
    return sorted(ops)


def next_reads(arrays: Arrays, evaluations: Ints, start: int) -> Ints:
    """Per storage: the first position from `start` on that reads the version made before `start`, or -1."""
    reads = np.full(arrays.size.size, _NEVER, np.int64)
    _look(arrays, evaluations, start, reads)
    return np.maximum(reads, _NEVER)


@native
def _look(arrays: Arrays, evaluations: Ints, start: int, reads: Ints) -> None:
    """Fill `reads`, which must be `_NEVER` for all storages at first; a version without a read stays `_UNKNOWN`."""
    for position in range(evaluations.size):
        op = evaluations[position]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            if reads[arrays.reads[at]] == _UNKNOWN and position >= start:
                reads[arrays.reads[at]] = position
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            if position < start:
                reads[arrays.makes[at]] = _UNKNOWN
            elif reads[arrays.makes[at]] == _UNKNOWN:
                reads[arrays.makes[at]] = _NEVER

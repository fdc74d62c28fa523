"""Compiled counting of live bytes, for use inside the solvers; the simulator checks the final schedules."""

from __future__ import annotations

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Ints
from memopt.solver.native import native
from memopt.solver.schedule import Schedule


def to_array(schedule: Schedule) -> Ints:
    """The schedule's op indices as an array; offloads are left out."""
    return np.array(schedule.evaluations, np.int64)


def to_schedule(evaluations: Ints) -> Schedule:
    """The schedule without offloads of an array of op indices."""
    return Schedule(tuple(evaluations.tolist()))


def live_bytes(arrays: Arrays, evaluations: Ints) -> Ints:
    """The live bytes at each evaluation, as `simulate` counts them."""
    change = np.zeros(evaluations.size + 1, np.int64)
    _count_changes(arrays, evaluations, np.full(arrays.size.size, -1, np.int64), change)
    return np.cumsum(change[:-1]) + arrays.workspace[evaluations] + arrays.resident_bytes


def peak_bytes(arrays: Arrays, evaluations: Ints) -> int:
    """The largest number of live bytes at any evaluation; the resident bytes for an empty schedule."""
    return int(live_bytes(arrays, evaluations).max(initial=arrays.resident_bytes))


def added_seconds(arrays: Arrays, evaluations: Ints) -> float:
    """Seconds of all recomputations: of every evaluation beyond the first of its op."""
    again = np.bincount(evaluations, minlength=arrays.seconds.size) - 1
    return float((again * arrays.seconds).sum())  # not @: BLAS would start threads for it


def remove_dead(arrays: Arrays, evaluations: Ints) -> Ints:
    """The schedule without recomputations that nothing reads, directly or through other recomputations."""
    keep = np.zeros(evaluations.size, np.bool_)
    keep[np.unique(evaluations, return_index=True)[1]] = True
    _mark_wanted(arrays, evaluations, np.zeros(arrays.size.size, np.bool_), keep)
    return evaluations[keep]


@native
def _count_changes(arrays: Arrays, evaluations: Ints, dies: Ints, change: Ints) -> None:
    """Add each version's bytes to `change` at its making and subtract them after its last live position.

    `dies` holds per storage the last live position of its latest version, and must be -1 for all storages at first.
    """
    count = evaluations.size
    for position in range(count):
        op = evaluations[position]
        for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
            dies[arrays.reads[at]] = max(dies[arrays.reads[at]], position)
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            storage = arrays.makes[at]
            change[position] += arrays.size[storage]
            if dies[storage] >= 0:
                change[dies[storage] + 1] -= arrays.size[storage]
                dies[storage] = position
            else:
                dies[storage] = count - 1 if arrays.kept[storage] else position
    for storage in range(arrays.size.size):
        if dies[storage] >= 0:
            change[dies[storage] + 1] -= arrays.size[storage]


@native
def _mark_wanted(arrays: Arrays, evaluations: Ints, wanted: Flags, keep: Flags) -> None:
    """Set `keep` for every evaluation that a later kept one reads; `keep` must be set for first evaluations."""
    for position in range(evaluations.size - 1, -1, -1):
        op = evaluations[position]
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            keep[position] |= wanted[arrays.makes[at]]
        if keep[position]:
            for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
                wanted[arrays.makes[at]] = False
            for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
                wanted[arrays.reads[at]] = True

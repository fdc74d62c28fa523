"""Compiled counting of live bytes, for use inside the solvers; `simulator` judges what comes out."""

from __future__ import annotations

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Ints
from memopt.solver.native import native
from memopt.solver.schedule import Schedule


def to_array(schedule: Schedule) -> Ints:
    """The evaluations as an array."""
    return np.array(schedule.evaluations, np.int64)


def to_schedule(evaluations: Ints) -> Schedule:
    """The array as a schedule of plain integers."""
    return Schedule(tuple(evaluations.tolist()))


def peak_bytes(arrays: Arrays, evaluations: Ints) -> int:
    """The most bytes live at any evaluation."""
    return int(live_bytes(arrays, evaluations).max(initial=arrays.resident_bytes))


def added_seconds(arrays: Arrays, evaluations: Ints) -> float:
    """Seconds beyond one evaluation of each op."""
    again = np.bincount(evaluations, minlength=arrays.seconds.size) - 1
    return float(again @ arrays.seconds)


def remove_dead(arrays: Arrays, evaluations: Ints) -> Ints:
    """The schedule without repeated evaluations that nothing reads."""
    return evaluations[wanted_evaluations(arrays, evaluations)]


@native
def live_bytes(arrays: Arrays, evaluations: Ints) -> Ints:
    """Bytes live at each evaluation."""
    count = evaluations.size
    dies = np.full(arrays.size.size, -1, np.int64)  # per storage: where its latest version dies; -1: not made yet
    change = np.zeros(count + 1, np.int64)
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
    live = np.cumsum(change[:count]) + arrays.resident_bytes
    for position in range(count):
        live[position] += arrays.workspace[evaluations[position]]
    return live


@native
def wanted_evaluations(arrays: Arrays, evaluations: Ints) -> Flags:
    """Which evaluations to keep: firsts, and those of which a later kept evaluation reads something."""
    count = evaluations.size
    first = np.full(arrays.seconds.size, count, np.int64)
    for position in range(count - 1, -1, -1):
        first[evaluations[position]] = position
    wanted = np.zeros(arrays.size.size, np.bool_)
    keep = np.zeros(count, np.bool_)
    for position in range(count - 1, -1, -1):
        op = evaluations[position]
        keep[position] = first[op] == position
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            keep[position] |= wanted[arrays.makes[at]]
        if keep[position]:
            for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
                wanted[arrays.makes[at]] = False
            for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
                wanted[arrays.reads[at]] = True
    return keep

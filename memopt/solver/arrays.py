"""A `RematProblem` as flat arrays, which compiled kernels can read, and the live bytes of schedules counted on them;
the simulator checks the final schedules."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.native import native
from memopt.solver.problem import RematProblem, Schedule

Ints = npt.NDArray[np.int64]
IntTable = npt.NDArray[np.int64]
"""An array of two dimensions; the other types have one."""
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Arrays(NamedTuple):
    """The problem's numbers by op and by storage. Lists are packed: list i is `values[start[i]:start[i + 1]]`."""

    forward_ops: int
    resident_bytes: int
    seconds: Floats
    workspace: Ints
    repeatable: Flags
    """Per op: whether it is a forward op that may be recomputed."""
    read_start: Ints
    reads: Ints
    make_start: Ints
    makes: Ints
    size: Ints
    """Per storage: its bytes."""
    kept: Flags
    movable: Flags
    """Per storage: whether it may be offloaded (`Storage.movable`, and not kept)."""
    home: Flags
    """Per storage: whether it lies on the host for the whole step (`Storage.home`)."""
    producer: Ints
    slot: Ints
    """Per storage: its place in its producer's list of made storages."""
    reader_start: Ints
    readers: Ints
    """Per storage: the forward ops that read it, packed with `reader_start`."""


def pack(rows: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """Pack lists of integers into two arrays (start, values), list i being `values[start[i]:start[i + 1]]`."""
    listed = [list(row) for row in rows]
    start = np.zeros(len(listed) + 1, np.int64)
    start[1:] = np.cumsum([len(row) for row in listed])
    return start, np.fromiter(chain.from_iterable(listed), np.int64, int(start[-1]))


def arrays_of(problem: RematProblem) -> Arrays:
    """The problem as arrays. A storage that an op lists twice among its reads is listed once."""
    ops = problem.ops
    read_start, reads = pack(sorted(set(op.reads)) for op in ops)
    make_start, makes = pack(op.makes for op in ops)
    slot = np.zeros(len(problem.storages), np.int64)
    for op in ops:
        for place, storage in enumerate(op.makes):
            slot[storage] = place
    forward_readers: list[list[int]] = [[] for _ in problem.storages]
    for index, op in enumerate(ops[: problem.forward_ops]):
        for storage in sorted(set(op.reads)):
            forward_readers[storage].append(index)
    reader_start, readers = pack(forward_readers)
    return Arrays(
        forward_ops=problem.forward_ops,
        resident_bytes=problem.resident_bytes,
        seconds=np.array([op.seconds for op in ops], np.float64),
        workspace=np.array([op.workspace_bytes for op in ops], np.int64),
        repeatable=np.array([op.recomputable and i < problem.forward_ops for i, op in enumerate(ops)], np.bool_),
        read_start=read_start,
        reads=reads,
        make_start=make_start,
        makes=makes,
        size=np.array([storage.bytes for storage in problem.storages], np.int64),
        kept=np.array([storage.kept for storage in problem.storages], np.bool_),
        movable=np.array([storage.movable and not storage.kept for storage in problem.storages], np.bool_),
        home=np.array([storage.home for storage in problem.storages], np.bool_),
        producer=np.array(problem.producer, np.int64),
        slot=slot,
        reader_start=reader_start,
        readers=readers,
    )


def to_array(schedule: Schedule) -> Ints:
    """The schedule's op indices as an array; offloads are left out."""
    return np.array(schedule.evaluations, np.int64)


def to_schedule(evaluations: Ints) -> Schedule:
    """The schedule, without offloads, that runs the ops with these indices in this order."""
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

    A version is a storage as one evaluation makes it. `dies` holds per storage the last live position of its latest
    version, and must be -1 for all storages at first.
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
    """Set `keep` for every evaluation whose results are read by a later one for which it is set.

    At first `keep` must be set for first evaluations only, and `wanted`, which is per storage, for none.
    """
    for position in range(evaluations.size - 1, -1, -1):
        op = evaluations[position]
        for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
            keep[position] |= wanted[arrays.makes[at]]
        if keep[position]:
            for at in range(arrays.make_start[op], arrays.make_start[op + 1]):
                wanted[arrays.makes[at]] = False
            for at in range(arrays.read_start[op], arrays.read_start[op + 1]):
                wanted[arrays.reads[at]] = True

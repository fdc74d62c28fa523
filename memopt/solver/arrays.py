"""A `RematProblem` as flat arrays, which compiled kernels can read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.problem import RematProblem

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
        producer=np.array(problem.producer, np.int64),
        slot=slot,
        reader_start=reader_start,
        readers=readers,
    )

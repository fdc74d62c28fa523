"""The usual recipes of activation checkpointing, as solvers: each proposes one schedule for all budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import numpy as np

from memopt.solver.cut_schedules import just_in_time
from memopt.solver.min_cut import needed_by_backward
from memopt.solver.problem import RematProblem
from memopt.solver.protocol import Solver
from memopt.solver.schedule import Schedule


@dataclass(frozen=True)
class SaveEverything:
    """Saves all activations and recomputes nothing, like training without checkpointing."""

    name: str = "save all"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return [Schedule.save_all(problem)]


@dataclass(frozen=True)
class CheckpointBlocks:
    """Saves only the inputs of each group of `every` blocks and recomputes the group in the backward.

    This is `torch.utils.checkpoint` around every group. Values made outside of blocks (`Op.block`) are saved. If no op
    has a block, the forward is cut into segments where few bytes cross, and these are used as blocks.
    """

    name: str
    every: int

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return [checkpointed(problem, forward_blocks(problem), self.every)]


@dataclass(frozen=True)
class AttentionOnly:
    """Recomputes the attention cores (`Op.attention`) and saves all other values that the backward reads."""

    name: str = "attention only"

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return [just_in_time(problem, _saved_unless(problem, lambda op: problem.ops[op].attention))]


def baseline_solvers(problem: RematProblem) -> list[Solver]:
    """The recipes that apply to the problem: save all, checkpoint blocks (Chen et al., 2016), attention only."""
    solvers: list[Solver] = [SaveEverything()]
    count = max(forward_blocks(problem), default=-1) + 1
    if count > 1:
        solvers.append(CheckpointBlocks("per block", 1))
        solvers += [CheckpointBlocks(f"every {every} blocks", every) for every in _group_sizes(count)]
        solvers.append(CheckpointBlocks("sqrt(L) segments", -(-count // isqrt(count))))
    if any(op.attention for op in problem.ops[: problem.forward_ops]):
        solvers.append(AttentionOnly())
    return solvers


def checkpointed(problem: RematProblem, blocks: list[int], every: int) -> Schedule:
    """The schedule that recomputes each group of `every` blocks from its inputs, given each forward op's block."""
    group = [block // every if block >= 0 else -1 for block in blocks]
    saved = _saved_unless(problem, lambda op: group[op] >= 0)
    crossing = {
        storage
        for index, op in enumerate(problem.ops[: problem.forward_ops])
        for storage in op.reads
        if group[problem.producer[storage]] != group[index]
    }
    return just_in_time(problem, saved | crossing)


def forward_blocks(problem: RematProblem) -> list[int]:
    """For each forward op its block, numbered from 0 in order of appearance, or -1; its segment if no op has one."""
    forward = problem.ops[: problem.forward_ops]
    number: dict[int, int] = {}
    for op in forward:
        if op.block >= 0:
            number.setdefault(op.block, len(number))
    if number:
        return [number.get(op.block, -1) for op in forward]
    starts = _segment_starts(problem)
    return [int(np.searchsorted(starts, index, "right")) - 1 for index in range(len(forward))]


def _saved_unless(problem: RematProblem, recomputed: Callable[[int], bool]) -> set[int]:
    """The storages to save: those that the backward or recomputed ops read, except those that recomputed ops make."""
    wanted = set(needed_by_backward(problem))
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        if recomputed(index):
            wanted.update(op.reads)
    return {storage for storage in wanted if not recomputed(problem.producer[storage])}


def _group_sizes(count: int) -> list[int]:
    """The group sizes 2, 3, 4, 6, 8, 12, … up to half of `count` blocks, so that there are at least two groups."""
    sizes = sorted({2**i for i in range(1, 12)} | {3 * 2**i for i in range(11)})
    return [size for size in sizes if 2 * size <= count]


def _segment_starts(problem: RematProblem) -> list[int]:
    """Ops at which segments of the forward begin: local minima of the crossing bytes in their lowest three tenths."""
    count = problem.forward_ops
    crossing = np.zeros(count + 1, np.int64)
    last_reader = {storage: index for index, op in enumerate(problem.ops[:count]) for storage in op.reads}
    for storage, reader in last_reader.items():
        crossing[problem.producer[storage] + 1 : reader + 1] += problem.storages[storage].bytes
    inner = crossing[1:count]
    if inner.size == 0:
        return [0]
    falls = crossing[1:count] <= np.minimum(crossing[: count - 1], np.quantile(inner, 0.3))
    next_crossing = np.append(crossing[2:count], crossing[count - 1])
    lowest = np.flatnonzero(falls & (inner < next_crossing))
    if lowest.size < 2:  # a uniform chain has no strict minima: any of its ops may begin a segment
        lowest = np.flatnonzero(falls & (inner <= next_crossing))
    return [0, *(1 + lowest).tolist()]

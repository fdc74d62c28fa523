"""Checkpointing as torch's own wrappers do it, as schedules of a captured step: a block's missing values are computed
again all at once, when its backward begins."""

from __future__ import annotations

from collections.abc import Callable

from memopt.solver import RematProblem, Schedule
from memopt.solver.protocol import forward_blocks

NOTHING, SELECTIVE, FULL = "nothing", "selective", "full"


def recipe(problem: RematProblem, name: str) -> Schedule:
    """The schedule of a recipe: `NOTHING` is recomputed; `SELECTIVE`: as torchtitan's selective checkpointing of
    operators, where every block saves its attention and every second matrix product; `FULL`: every block saves its
    input."""
    if name == NOTHING:
        return Schedule.save_all(problem)
    return checkpointed(problem, _every_second_product(problem) if name == SELECTIVE else lambda index: False)


def checkpointed(problem: RematProblem, saves: Callable[[int], bool]) -> Schedule:
    """The schedule in which blocks save their inputs and the results of the ops for which `saves` is true; all others
    are evaluated again, in order, before the first op of the backward that misses one of the block."""
    blocks = forward_blocks(problem)
    members: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        if block >= 0:
            members.setdefault(block, []).append(index)
    present = {s for i, op in enumerate(problem.ops[: len(blocks)]) if blocks[i] < 0 or saves(i) for s in op.makes}
    # What another block reads is the input that it saves.
    present |= {
        s
        for i, op in enumerate(problem.ops[: len(blocks)])
        for s in op.reads
        if blocks[problem.producer[s]] != blocks[i]
    }
    evaluations = list(range(problem.forward_ops))
    for index in range(problem.forward_ops, len(problem.ops)):
        for storage in problem.ops[index].reads:
            if storage not in present and problem.producer[storage] < problem.forward_ops:
                again = _again(problem, members[blocks[problem.producer[storage]]], present)
                evaluations += again
                present.update(made for one in again for made in problem.ops[one].makes)
        evaluations.append(index)
        present.update(problem.ops[index].makes)
    return Schedule(tuple(evaluations))


def _again(problem: RematProblem, block: list[int], present: set[int]) -> list[int]:
    """The ops of a block that make what is missing and somebody reads in the backward, in order."""
    read_late = {s for op in problem.ops[problem.forward_ops :] for s in op.reads}
    needed: set[int] = set()
    for index in reversed(block):
        op = problem.ops[index]
        missing = [s for s in op.makes if s not in present]
        if any(s in read_late or s in needed for s in missing):
            needed.update(op.reads)
    return [
        index
        for index in block
        if any(s not in present and (s in read_late or s in needed) for s in problem.ops[index].makes)
    ]


def _every_second_product(problem: RematProblem) -> Callable[[int], bool]:
    """Which ops of blocks are saved: attention, and the first, third, … matrix product of each block."""
    blocks = forward_blocks(problem)
    saved: set[int] = set()
    products: dict[int, int] = {}
    for index, block in enumerate(blocks):
        name = problem.ops[index].name
        if name.startswith(("mm", "addmm")):
            products[block] = products.get(block, 0) + 1
            if products[block] % 2:
                saved.add(index)
        elif "scaled_dot_product" in name:
            saved.add(index)
    return saved.__contains__

"""Divides a step into a chain of blocks: the forward where few bytes cross, the backward to match."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Ints
from memopt.solver.held import Held
from memopt.solver.problem import RematProblem


@dataclass(frozen=True)
class Block:
    """A range of forward ops and the range of backward ops that belongs to it."""

    forward: range
    backward: range


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward; their backwards run in reverse order.

    Bytes count only storages that can be recomputed ("movable"): the others are held in any case.
    """

    blocks: tuple[Block, ...]
    extra_bytes: Ints
    """[s, c]: bytes that enter block c and do not enter block s, if s < c; otherwise 0."""
    leaving: tuple[tuple[int, ...], ...]
    """Per block: the storages it makes that a later block reads."""
    held_bytes: Ints
    """Per op: bytes that every schedule holds at its first evaluation, besides the storages that it reads and makes."""
    own_bytes: Ints
    """Per op: `held_bytes` plus its workspace and the storages it makes that are not movable."""


def chain_of(problem: RematProblem, most_blocks: int) -> Chain:
    """Cut the forward at local minima of the bytes that cross, into about `most_blocks` blocks at most.

    A backward op goes to the block whose forward ops read the same storages: the gradient of a block's first op reads
    an input of this block, which is an output of the previous one.
    """
    fixed = Held(problem)
    movable = fixed.movable.tolist()
    last_reader = _last_forward_readers(problem)
    starts = _starts(_crossing_bytes(problem, movable, last_reader), most_blocks)
    stops = [*starts[1:], problem.forward_ops]
    block_of = np.repeat(np.arange(len(starts)), np.subtract(stops, starts))
    made = [int(block_of[op]) if op < problem.forward_ops else -1 for op in problem.producer]
    consumed = [int(block_of[op]) if op >= 0 else -1 for op in last_reader]
    backward = _share_out(problem, movable, made, consumed, len(starts))
    leaving: list[list[int]] = [[] for _ in starts]
    for storage, block in enumerate(made):
        if movable[storage] and consumed[storage] > block:
            leaving[block].append(storage)
    return Chain(
        blocks=tuple(
            Block(range(start, stop), share) for start, stop, share in zip(starts, stops, backward, strict=True)
        ),
        extra_bytes=_extra_bytes(problem, leaving, consumed),
        leaving=tuple(tuple(storages) for storages in leaving),
        held_bytes=fixed.bytes,
        own_bytes=fixed.own_bytes,
    )


def _last_forward_readers(problem: RematProblem) -> list[int]:
    """Per storage: the last forward op that reads it, or -1."""
    last = [-1] * len(problem.storages)
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        for storage in op.reads:
            last[storage] = index
    return last


def _crossing_bytes(problem: RematProblem, movable: list[bool], last_reader: list[int]) -> Ints:
    """Per forward op: bytes of the storages made before it that it or a later forward op reads."""
    change = np.zeros(problem.forward_ops + 1, np.int64)
    for storage, reader in enumerate(last_reader):
        if movable[storage] and reader >= 0:
            change[problem.producer[storage] + 1] += problem.storages[storage].bytes
            change[reader + 1] -= problem.storages[storage].bytes
    return np.cumsum(change[:-1])


def _starts(crossing: Ints, most_blocks: int) -> list[int]:
    """First ops of the blocks: local minima of `crossing`; if too many, the lowest, with equal ones evenly spread."""
    if crossing.size < 2:
        return [0] if crossing.size else []
    inner, end = crossing[1:], np.iinfo(np.int64).max
    falls = inner <= np.concatenate(([end], inner[:-1]))
    lowest = 1 + np.flatnonzero(falls & (inner <= np.concatenate((inner[1:], [end]))))
    while lowest.size > most_blocks - 1:
        highest = crossing[lowest].max()
        below, ties = lowest[crossing[lowest] < highest], lowest[crossing[lowest] == highest]
        room = most_blocks - 1 - below.size
        if room > ties.size // 8:
            # A few blocks too many are better than half of the places in a model whose layers are all alike.
            every = 1 if ties.size < 1.25 * room else -(-ties.size // room)
            return [0, *sorted((*below.tolist(), *ties[::every].tolist()))]
        lowest = below
    return [0, *lowest.tolist()]


def _share_out(
    problem: RematProblem, movable: list[bool], made: list[int], consumed: list[int], blocks: int
) -> list[range]:
    """Per block: its range of the backward, by dynamic programming.

    It minimises the sum over backward ops of the distance, in blocks, from the blocks whose storages the op reads.
    """
    first, count = problem.forward_ops, len(problem.ops) - problem.forward_ops
    cost = np.zeros(blocks)
    place = np.arange(blocks)
    origin = np.zeros((count, blocks), np.int64)
    for at in range(count):
        # The previous op of the backward is in the same block or in one of a higher number.
        best = np.minimum.accumulate(cost[::-1])[::-1]
        origin[at] = np.minimum.accumulate(np.where(cost == best, place, blocks)[::-1])[::-1]
        cost = best
        reads = [s for s in problem.ops[first + at].reads if movable[s]]
        if reads:
            low = max(made[s] for s in reads)
            high = min(max(consumed[s], made[s]) for s in reads)
            distance = np.maximum(np.maximum(min(low, high) - place, place - high), 0)
            cost = cost + distance + 0.01 * np.minimum(np.abs(place - high), 1)
    chosen = np.zeros(count, np.int64)
    block = int(np.argmin(cost)) if blocks else 0
    for at in range(count - 1, -1, -1):
        chosen[at] = block
        block = int(origin[at, block])
    stops = [first + int(np.searchsorted(-chosen, -block, "right")) for block in range(blocks)]
    return [range(stops[k + 1] if k + 1 < blocks else first, stops[k]) for k in range(blocks)]


def _extra_bytes(problem: RematProblem, leaving: list[list[int]], consumed: list[int]) -> Ints:
    """The table `Chain.extra_bytes`, with one row and one column more than there are blocks."""
    count = len(leaving)
    extra = np.zeros((count + 1, count + 1), np.int64)
    for block, storages in enumerate(leaving):
        for storage in storages:
            extra[: block + 1, block + 1 : consumed[storage] + 1] += problem.storages[storage].bytes
    return extra

"""Divides a step into a chain of blocks, the forward where few bytes cross and the backward to match; and fills a
table, by compiled code, from which the fastest nested plan of the chain is read. In a nested plan, blocks that are
recomputed may again save only some of their values, so that the others are recomputed once more.

`cost[row(s, t), m]` is the least seconds added by the forwards and backwards of blocks s … t in `m` slots of memory (a
slot is a fixed number of bytes), given the inputs of block s. If t is the last block, the forwards are first
evaluations and add nothing; in all other rows they are recomputations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.arrays import Floats, Ints, IntTable
from memopt.solver.lower_bound import HeldBytes
from memopt.solver.native import is_compiled, native, native_part
from memopt.solver.problem import RematProblem


@dataclass(frozen=True)
class _Block:
    """A range of forward ops and the range of backward ops that belongs to it."""

    forward: range
    backward: range


@dataclass(frozen=True)
class Chain:
    """Blocks in the order of the forward; their backwards run in reverse order.

    Bytes count only storages that can be recomputed ("movable"): the others are held in any case.
    """

    blocks: tuple[_Block, ...]
    extra_bytes: Ints
    """[s, c]: bytes that enter block c and do not enter block s, if s < c; otherwise 0."""
    leaving: tuple[tuple[int, ...], ...]
    """Per block: the storages it makes that a later block reads."""
    held: HeldBytes


def chain_of(problem: RematProblem, most_blocks: int) -> Chain:
    """Cut the forward at local minima of the bytes that cross, into about `most_blocks` blocks at most.

    A backward op goes to the block whose forward ops read the storages that it reads, not to the block that made them:
    the gradient of a block's first op reads an input of that block, which the previous block made.
    """
    held = HeldBytes(problem)
    movable = held.movable.tolist()
    last_reader = last_forward_readers(problem)
    starts = _starts(crossing_bytes(problem, np.where(movable, last_reader, -1).tolist()), most_blocks)
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
            _Block(range(start, stop), share) for start, stop, share in zip(starts, stops, backward, strict=True)
        ),
        extra_bytes=_extra_bytes(problem, leaving, consumed),
        leaving=tuple(tuple(storages) for storages in leaving),
        held=held,
    )


def last_forward_readers(problem: RematProblem) -> list[int]:
    """Per storage: the last forward op that reads it, or -1."""
    last = [-1] * len(problem.storages)
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        for storage in op.reads:
            last[storage] = index
    return last


def crossing_bytes(problem: RematProblem, last_reader: list[int]) -> Ints:
    """Per forward op: bytes of the storages made before it that it or a later forward op reads. `last_reader` has for
    each storage the last forward op that reads it, or -1 for a storage that does not count."""
    change = np.zeros(problem.forward_ops + 1, np.int64)
    for storage, reader in enumerate(last_reader):
        if reader >= 0:
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

    It minimises the sum over backward ops of the distance, in blocks, from the blocks whose storages the op reads. Per
    storage, `made` is the block that makes it, and `consumed` the last block that reads it in the forward; -1 for none.
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


Table = npt.NDArray[np.float32]


class ChainCosts(NamedTuple):
    """A chain in seconds and in slots, the unit of memory. Block s has options start[s] … start[s+1] - 1.

    Fields without a docstring hold, per option, the field of `block_options.Option` of that name.
    """

    start: Ints
    saved: Ints
    forward: Ints
    backward: Ints
    """Per option: the peak of the backward, with the slots that are held in any case."""
    alone: Ints
    seconds: Floats
    again_seconds: Floats
    alone_seconds: Floats
    unsaved: Ints
    """Per block: the peak of its forward when only its outputs are held."""
    unsaved_seconds: Floats
    """Per block: seconds of that forward."""
    first_held: Ints
    """Per block: slots held in any case during its first forward."""
    again_held: Ints
    """Per block t: slots held in any case just before its backward, when blocks up to t are recomputed."""
    extra: IntTable
    """[s, c]: slots of the storages that enter block c and do not enter block s."""


@native
def row(s: int, t: int) -> int:
    """The number of the table's row for blocks s … t."""
    return t * (t + 1) // 2 + s


def _lower_in_a_loop(here: Table, first: Table, second: Table, seconds: np.float32) -> None:
    """Set `here` to the minimum of itself and first + second + seconds, in place and elementwise."""
    for m in range(here.size):
        total = first[m] + second[m] + seconds
        here[m] = total if total < here[m] else here[m]


def _lower_at_once(here: Table, first: Table, second: Table, seconds: np.float32) -> None:
    """The same as `_lower_in_a_loop`, as one array expression."""
    np.minimum(here, first[: here.size] + second[: here.size] + seconds, out=here)


# In machine code the loop is four times as fast as the array expression; in plain Python it would be far too slow.
_lower = native_part(_lower_in_a_loop) if is_compiled() else _lower_at_once


@native
def fill(costs: ChainCosts, slots: int, cost: Table) -> None:
    """Fill the table `cost`, whose rows have `slots` entries and must be infinite at first."""
    blocks = costs.unsaved.size
    nothing = np.zeros(slots, np.float32)
    for t in range(blocks):
        for s in range(t, -1, -1):
            here = cost[row(s, t)]
            for option in range(costs.start[s], costs.start[s + 1]):
                needs, less, seconds = run_block(costs, s, t, option)
                start = min(needs if s == t else max(needs, less), slots)
                if s == t:
                    _lower(here[start:], nothing[start:], nothing[start:], seconds)
                else:
                    _lower(here[start:], cost[row(s + 1, t), start - less :], nothing[start:], seconds)
            needs = 0
            seconds = np.float32(0.0)
            for c in range(s + 1, t + 1):
                needs, seconds = pass_block(costs, s, c, t, needs, seconds)
                less = costs.extra[s, c]
                start = min(max(needs, less), slots)
                _lower(here[start:], cost[row(c, t), start - less :], cost[row(s, c - 1), start:], seconds)


@native
def choose(costs: ChainCosts, cost: Table, s: int, t: int, m: int) -> int:
    """The choice that attains `cost[row(s, t), m]`.

    It is c > s if blocks s … c-1 run first, saving nothing; -1 - i if block s runs by option i; and s if nothing fits.
    """
    best = np.float32(np.inf)
    choice = s
    for option in range(costs.start[s], costs.start[s + 1]):
        needs, less, seconds = run_block(costs, s, t, option)
        if m < needs or (s < t and m < less):
            continue
        total = seconds if s == t else seconds + cost[row(s + 1, t), m - less]
        if total < best:
            best = total
            choice = -1 - option
    needs = 0
    seconds = np.float32(0.0)
    for c in range(s + 1, t + 1):
        needs, seconds = pass_block(costs, s, c, t, needs, seconds)
        less = costs.extra[s, c]
        if m >= max(needs, less):
            total = seconds + cost[row(c, t), m - less] + cost[row(s, c - 1), m]
            if total < best:
                best = total
                choice = c
    return choice


@native_part
def run_block(costs: ChainCosts, s: int, t: int, option: int) -> tuple[int, int, np.float32]:
    """The cost of running block s by an option in a plan for blocks s … t, where the backward of blocks s+1 … t comes
    before that of block s. `option` is a number in the lists of `costs`. Returns the peak memory and what stays saved
    for the backward of block s, both in slots, and the seconds."""
    needs = costs.backward[option]
    if t == costs.unsaved.size - 1:
        return (
            max(needs, costs.forward[option] + costs.first_held[s]),
            costs.saved[option],
            np.float32(costs.seconds[option]),
        )
    if s == t:
        return (
            max(needs, costs.alone[option] + costs.again_held[t]),
            0,
            np.float32(costs.seconds[option] + costs.alone_seconds[option]),
        )
    return (
        max(needs, costs.forward[option] + costs.again_held[t]),
        costs.saved[option],
        np.float32(costs.seconds[option] + costs.again_seconds[option]),
    )


@native_part
def pass_block(costs: ChainCosts, s: int, c: int, t: int, needs: int, seconds: np.float32) -> tuple[int, np.float32]:
    """The slots and seconds that it takes to run blocks s … c-1 without saving anything, in a plan for blocks s … t.

    `needs` and `seconds` are the slots and seconds of running blocks s … c-2: what this returns for c-1; 0 for none.
    """
    block = c - 1
    held = costs.first_held[block] if t == costs.unsaved.size - 1 else costs.again_held[t]
    entering = costs.extra[s, block] if block > s else 0
    needs = max(needs, entering + costs.unsaved[block] + held)
    if t < costs.unsaved.size - 1:
        seconds += np.float32(costs.unsaved_seconds[block])
    return needs, seconds

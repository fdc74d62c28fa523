"""A step as a chain of blocks, the forward divided where few bytes cross and the backward to match; and the options for
each block: which storages to save, and how its backward recomputes the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from memopt.solver.arrays import Arrays, Ints, arrays_of, live_bytes, peak_bytes, to_array
from memopt.solver.lower_bound import HeldBytes
from memopt.solver.min_cut import CutNetwork, just_in_time, lower_hull
from memopt.solver.polish import polish
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.repair import repair

# The most cuts of one block's hull, and the caps for its repairs, below the peak of saving everything.
_CUTS, _CAPS = 10, 4
# The most options that are kept for one block.
_MOST_OPTIONS = 12


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


@dataclass(frozen=True)
class Option:
    """One way to run a block. Bytes are of workspaces and of storages that can be recomputed, without its inputs."""

    forward: tuple[int, ...]
    """Ops of the block's forward, in order."""
    backward: tuple[int, ...]
    """Ops of the block's backward in order, recomputed forward ops included."""
    saved_bytes: int
    """Bytes held from the block's forward to its backward, its outputs included."""
    forward_bytes: int
    """The peak of the block's forward."""
    backward_bytes: int
    """The peak of the block's backward, above the bytes that are held in any case (`Choices.base_bytes`)."""
    seconds: float
    """Seconds of the recomputations in the backward."""
    again_seconds: float
    """Seconds of the ops that recompute the saved storages and the block's outputs from its inputs."""
    alone_seconds: float
    """Seconds of the ops that recompute the saved storages only."""
    alone_bytes: int
    """The peak of a forward that recomputes the saved storages only."""


@dataclass(frozen=True)
class Choices:
    """The options of one block, without those that another option equals or betters in every respect."""

    options: tuple[Option, ...]
    unsaved_bytes: int
    """The peak of the block's forward when only its outputs are held."""
    unsaved_seconds: float
    """Seconds of the ops that make the block's outputs from its inputs."""
    base_bytes: int
    """The least bytes that are held in any case at an op of the block's backward."""


def choices_of(problem: RematProblem, chain: Chain) -> list[Choices]:
    """The options of every block of the chain; blocks with equal bytes and seconds are solved once."""
    known: dict[tuple[RematProblem, tuple[int, ...]], tuple[list[Option], Option]] = {}
    choices = []
    for number in range(len(chain.blocks)):
        local, held, ops, base_bytes = _local_problem(problem, chain, number)
        if (local, held) not in known:
            measure = _Measure(local, held)
            leaves = measure.option(tuple(range(local.forward_ops)))
            known[local, held] = _options(measure, few=len(known) > 24), leaves
        options, leaves = known[local, held]
        renamed = tuple(_renamed(option, ops) for option in options)
        choices.append(Choices(renamed, leaves.forward_bytes, leaves.again_seconds, base_bytes))
    return choices


def _local_problem(
    problem: RematProblem, chain: Chain, number: int
) -> tuple[RematProblem, tuple[int, ...], list[int], int]:
    """Block `number` as a problem of its own, equal for blocks with equal numbers. The last forward op stands for the
    rest of the step: it reads the block's outputs. Also, per backward op, the bytes held in any case at it, above the
    block's base bytes; for each op the index of the step's op, -1 for the one that stands for the rest of the step; and
    the block's base bytes (`Choices.base_bytes`)."""
    block, movable = chain.blocks[number], chain.held.movable
    local: dict[int, int] = {}
    ops: list[Op] = []
    for index in block.forward:
        op = problem.ops[index]
        reads = tuple(sorted({local[s] for s in op.reads if s in local}))
        fixed = sum(problem.storages[s].bytes for s in op.makes if not movable[s])
        makes = tuple(local.setdefault(s, len(local)) for s in op.makes if movable[s])
        ops.append(Op("", op.seconds, reads, makes, op.workspace_bytes + fixed, op.recomputable))
    ops.append(Op("", 0.0, tuple(sorted(local[s] for s in chain.leaving[number])), (), 0, False))
    base = min((int(chain.held.bytes[index]) for index in block.backward), default=0)
    for index in block.backward:
        reads = tuple(sorted({local[s] for s in problem.ops[index].reads if s in local}))
        ops.append(Op("", 0.0, reads, (), int(chain.held.own_bytes[index]) - base, False))
    storages = tuple(Storage("", problem.storages[s].bytes) for s in local)
    held = tuple(int(chain.held.bytes[index]) - base for index in block.backward)
    whole = RematProblem(tuple(ops), storages, len(block.forward) + 1)
    return whole, held, [*block.forward, -1, *block.backward], base


class _Measure:
    """Measures the bytes and seconds of schedules of one block, given as `_local_problem` returns it."""

    def __init__(self, problem: RematProblem, held: tuple[int, ...]) -> None:
        self.problem = problem
        self.arrays: Arrays = arrays_of(problem)
        self._held = np.array([*held, 0], np.int64)

    def option(self, forward: tuple[int, ...], backward: Ints | None = None) -> Option:
        """The option with this forward and backward, given as op indices of the block's own problem.

        Without a backward, only the block's outputs are held after the forward.
        """
        first = self.problem.forward_ops
        after = np.zeros(0, np.int64) if backward is None else backward
        whole = np.concatenate((np.array(forward, np.int64), after))
        live = live_bytes(self.arrays, whole)
        saved = self._read_before_made(after.tolist())
        following = np.searchsorted(np.flatnonzero(after >= first), np.arange(after.size))
        held = self._held[following] * (after < first)
        again = self._ancestors({*saved, *self.problem.ops[first - 1].reads})
        alone = self._ancestors(saved)
        alone_evaluations = np.array([op for op in forward if op in alone], np.int64)
        alone_live = live_bytes(self.arrays, np.concatenate((alone_evaluations, after)))[: alone_evaluations.size]
        seconds = self.arrays.seconds
        return Option(
            forward=forward[:-1],
            backward=tuple(after.tolist()),
            saved_bytes=int(live[len(forward) - 1]),
            forward_bytes=int(live[: len(forward)].max(initial=0)),
            backward_bytes=int((live[len(forward) :] + held).max(initial=0)),
            seconds=float(seconds[after].sum()),
            again_seconds=float(sum(seconds[op] for op in sorted(again))),
            alone_seconds=float(sum(seconds[op] for op in sorted(alone))),
            alone_bytes=int(alone_live.max(initial=0)),
        )

    def _read_before_made(self, backward: list[int]) -> set[int]:
        """The storages that the backward reads before it recomputes them: the saved ones."""
        made: set[int] = set()
        saved: set[int] = set()
        for op in backward:
            saved.update(s for s in self.problem.ops[op].reads if s not in made)
            made.update(self.problem.ops[op].makes)
        return saved

    def _ancestors(self, wanted: Iterable[int]) -> set[int]:
        """The ops that make the storages from the block's inputs."""
        pending, ops = list(wanted), set[int]()
        while pending:
            op = self.problem.producer[pending.pop()]
            if op not in ops:
                ops.add(op)
                pending += self.problem.ops[op].reads
        return ops


def _options(measure: _Measure, few: bool) -> list[Option]:
    """The options of one block, from cuts and repairs of it; fewer of both are tried if `few`."""
    problem, arrays = measure.problem, measure.arrays
    cuts = lower_hull(CutNetwork(problem), _CUTS // 2 if few else _CUTS)
    plans = [to_array(just_in_time(problem, cut.saved)) for cut in cuts]
    plans = [polish(arrays, plan, peak_bytes(arrays, plan)) for plan in plans]
    save_all = to_array(Schedule.save_all(problem))
    plans.append(save_all)
    most, least = peak_bytes(arrays, save_all), min(peak_bytes(arrays, plan) for plan in plans)
    for share in np.linspace(0.9, 0.0, 2 if few else _CAPS):
        for seed in (plans[0], save_all):
            repaired, _ = repair(arrays, seed, int(least + share * (most - least) * 0.9), 1.0, 0.5)
            if repaired is not None:
                plans.append(repaired)
    options = []
    for plan in plans:
        cut = 1 + int(np.flatnonzero(plan == problem.forward_ops - 1)[0])
        options.append(measure.option(tuple(plan[:cut].tolist()), plan[cut:]))
    return _best(options)


def _best(options: list[Option]) -> list[Option]:
    """The options that no other beats in bytes and seconds, by rising saved bytes; at most `_MOST_OPTIONS`."""
    best: list[Option] = []
    for option in sorted(options, key=lambda o: (o.saved_bytes, o.seconds, o.backward_bytes, o.forward_bytes)):
        if not any(
            other.seconds <= option.seconds + 1e-12
            and other.backward_bytes <= option.backward_bytes
            and other.forward_bytes <= option.forward_bytes
            and other.alone_bytes <= option.alone_bytes
            for other in best
        ):
            best.append(option)
    if len(best) > _MOST_OPTIONS:
        best = [best[round(i)] for i in np.linspace(0, len(best) - 1, _MOST_OPTIONS)]
    return best


def _renamed(option: Option, ops: list[int]) -> Option:
    """The option with its ops replaced by `ops[op]`, the op of the whole step."""
    forward = tuple(ops[op] for op in option.forward if ops[op] >= 0)
    return replace(option, forward=forward, backward=tuple(ops[op] for op in option.backward))

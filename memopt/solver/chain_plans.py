"""Nested chain plans: which storages to save at each level of recomputation, optimal for a chain of blocks.

With `Opt(s, t, m)` the least seconds to run blocks s … t forwards and backwards in memory m, given the inputs of s,

    Opt(s, t, m) = min( block s by one of its options, then Opt(s+1, t, m - bytes that the option saves),
                        run s … c-1 saving nothing, then Opt(c, t, m - bytes that enter c), then Opt(s, c-1, m) )

as in rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, equation 1), with several options
for a block as in Rockmate (Zhao et al., 2023). The table ignores reads across blocks and rounds bytes to slots, so a
plan's true peak may pass its cap: a plan is a seed for repair and polish.

A table has `cost[row(s, t), m]`, for `m` slots of memory (a slot is a fixed number of bytes), and is filled by compiled
code. If t is the last block, the forwards are first evaluations and add nothing; in all other rows they are
recomputations.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.arrays import Arrays, Floats, Ints, IntTable, arrays_of, peak_bytes, remove_dead
from memopt.solver.chain import Chain, Choices, Option, chain_of, choices_of
from memopt.solver.native import is_compiled, native, native_part
from memopt.solver.problem import RematProblem

Table = npt.NDArray[np.float32]
# Plans are made for these multiples of the budget.
_SHARES = (1.0, 1.06, 1.15, 1.3)
# The most slots of memory in a table.
_SLOTS = 2000
# The most work of filling a table, blocks^3 / 6 times (slots + overhead): a third of a second.
_WORK, _OVERHEAD = 4e8, 50
_MOST_BLOCKS = 512


class _ChainCosts(NamedTuple):
    """A chain in seconds and in slots, the unit of memory. Block s has options start[s] … start[s+1] - 1.

    Fields without a docstring hold, per option, the field of `chain.Option` of that name.
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
def fill(costs: _ChainCosts, slots: int, cost: Table) -> None:
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
def choose(costs: _ChainCosts, cost: Table, s: int, t: int, m: int) -> int:
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
def run_block(costs: _ChainCosts, s: int, t: int, option: int) -> tuple[int, int, np.float32]:
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
def pass_block(costs: _ChainCosts, s: int, c: int, t: int, needs: int, seconds: np.float32) -> tuple[int, np.float32]:
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


class NestedChain:
    """Schedules of one problem that recompute in several levels, optimal for the forward cut into a chain of blocks
    (rotor, Beaumont et al., 2019). The portfolio repairs those that exceed the budget, and polishes those that leave
    memory unused. Chains of blocks and their options are cached by number of blocks."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self._arrays = arrays_of(problem)
        self._chains: dict[int, Chain] = {}
        self._choices: dict[int, list[Choices]] = {}

    def plans(self, budget_bytes: int) -> list[Ints]:
        """The evaluations of the plans for the budget and for a few multiples of it; none without a chain."""
        table = self.table(int(_SHARES[-1] * budget_bytes))
        if table is None or table.smallest_cap_bytes is None:
            return []
        caps = dict.fromkeys(max(int(share * budget_bytes), table.smallest_cap_bytes) for share in _SHARES)
        return [plan for cap_bytes in caps if (plan := table.plan(cap_bytes)) is not None]

    def table(self, cap_bytes: int) -> _ChainTable | None:
        """The plans for all caps on live bytes up to `cap_bytes`; None if the cap or the forward allows fewer than two
        blocks."""
        slot_bytes = max(self._grain, -(-(cap_bytes - self._problem.resident_bytes) // _SLOTS), 1)
        slots = (cap_bytes - self._problem.resident_bytes) // slot_bytes + 1
        if slots < 1:
            return None
        most_blocks = min(int((6 * _WORK / (slots + _OVERHEAD)) ** (1 / 3)), _MOST_BLOCKS)
        if most_blocks not in self._chains:
            self._chains[most_blocks] = chain_of(self._problem, most_blocks)
        chain = self._chains[most_blocks]
        count = len(chain.blocks)
        if count < 2:
            return None
        if count not in self._choices:
            self._choices[count] = choices_of(self._problem, chain)
        return _ChainTable(self._arrays, chain, self._choices[count], slot_bytes, slots)

    def deepest(self, cap_bytes: int) -> tuple[list[Ints], _ChainTable | None]:
        """The evaluations of plans with ever smaller peaks, all below the cap, and the last table that was looked at.

        A table for less memory can have more blocks, so each table's smallest peak is the cap of the next table."""
        plans: list[Ints] = []
        while (table := self.table(cap_bytes)) is not None and table.smallest_cap_bytes is not None:
            plan = table.plan(table.smallest_cap_bytes)
            assert plan is not None
            peak = peak_bytes(self._arrays, plan)
            if peak >= cap_bytes:
                break
            plans.append(plan)
            cap_bytes = peak
        return plans, table

    @cached_property
    def _grain(self) -> int:
        """The greatest common divisor of all sizes in bytes: slots of this size need no rounding."""
        return gcd(*(s.bytes for s in self._problem.storages), *(op.workspace_bytes for op in self._problem.ops))


class _ChainTable:
    """The optimal nested plans of one chain for all caps up to `slots` slots of `slot_bytes` above resident bytes."""

    def __init__(self, arrays: Arrays, chain: Chain, choices: list[Choices], slot_bytes: int, slots: int) -> None:
        self._arrays = arrays
        self._chain = chain
        self._options = [option for choice in choices for option in choice.options]
        self._slot_bytes = slot_bytes
        self._costs = _in_slots(chain, choices, slot_bytes)
        self._last = len(chain.blocks) - 1
        rows = row(self._last, self._last) + 1
        self._table: Table = np.full((rows, slots), np.inf, np.float32)
        fill(self._costs, slots, self._table)

    @property
    def smallest_cap_bytes(self) -> int | None:
        """The smallest cap in bytes for which the table has a plan; None if it has no plan at all."""
        fits = np.flatnonzero(np.isfinite(self._table[row(0, self._last)]))
        return int(fits[0]) * self._slot_bytes + self._arrays.resident_bytes if fits.size else None

    def plan(self, cap_bytes: int) -> Ints | None:
        """The evaluations of the plan for a cap, which its true peak may pass a little; None if there is no plan."""
        memory = min((cap_bytes - self._arrays.resident_bytes) // self._slot_bytes, self._table.shape[1] - 1)
        if memory < 0 or not np.isfinite(self._table[row(0, self._last), memory]):
            return None
        evaluations: list[int] = []
        work: list[tuple[int, int, int] | Option] = [(0, self._last, memory)]
        while work:
            part = work.pop()
            if isinstance(part, Option):
                evaluations += part.backward
                continue
            s, t, memory = part
            choice = int(choose(self._costs, self._table, s, t, memory))
            assert choice != s, "some of the plan's blocks do not fit in the memory that the plan gives them"
            if choice > s:
                for block in range(s, choice):
                    evaluations += self._forward(self._chain.blocks[block].forward, t)
                entering = int(self._costs.extra[s, choice])
                work += [(s, choice - 1, memory), (choice, t, memory - entering)]
                continue
            option = self._options[-1 - choice]
            evaluations += self._forward(option.forward, t)
            work.append(option)
            if s < t:
                work.append((s + 1, t, memory - int(self._costs.saved[-1 - choice])))
        return remove_dead(self._arrays, np.array(evaluations, np.int64))

    def _forward(self, ops: Iterable[int], t: int) -> list[int]:
        """The ops of a forward as part of a run of blocks up to `t`: those that may be recomputed if it is not the
        first."""
        return [op for op in ops if t == self._last or self._arrays.repeatable[op]]


def _in_slots(chain: Chain, choices: list[Choices], slot_bytes: int) -> _ChainCosts:
    """The chain's bytes in slots, rounded to the nearest so that errors cancel out over many blocks."""

    def slots(values: list[int] | Ints) -> Ints:
        return np.floor_divide(np.asarray(values, np.int64) + slot_bytes // 2, slot_bytes)

    options = [option for choice in choices for option in choice.options]
    bases = [choice.base_bytes for choice in choices for _ in choice.options]
    return _ChainCosts(
        start=np.cumsum([0, *(len(choice.options) for choice in choices)]),
        saved=slots([option.saved_bytes for option in options]),
        forward=slots([option.forward_bytes for option in options]),
        backward=slots([option.backward_bytes + base for option, base in zip(options, bases, strict=True)]),
        alone=slots([option.alone_bytes for option in options]),
        seconds=np.array([option.seconds for option in options], np.float64),
        again_seconds=np.array([option.again_seconds for option in options], np.float64),
        alone_seconds=np.array([option.alone_seconds for option in options], np.float64),
        unsaved=slots([choice.unsaved_bytes for choice in choices]),
        unsaved_seconds=np.array([choice.unsaved_seconds for choice in choices], np.float64),
        first_held=slots([int(chain.held.bytes[b.forward.start : b.forward.stop].max()) for b in chain.blocks]),
        again_held=slots([int(chain.held.bytes[b.backward.start]) for b in chain.blocks]),
        extra=slots(chain.extra_bytes),
    )

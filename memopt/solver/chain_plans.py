"""Nested chain plans: which storages to save at each level of recomputation, optimal for a chain of blocks.

With `Opt(s, t, m)` the least seconds to run blocks s … t forwards and backwards in memory m, given the inputs of s,

    Opt(s, t, m) = min( block s by one of its options, then Opt(s+1, t, m - bytes that the option saves),
                        run s … c-1 saving nothing, then Opt(c, t, m - bytes that enter c), then Opt(s, c-1, m) )

as in rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, equation 1), with several options
for a block as in Rockmate (Zhao et al., 2023). The table ignores reads across blocks and rounds bytes to slots, so a
plan's true peak may pass its cap: a plan is a seed for repair and polish.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import gcd

import numpy as np

from memopt.solver.arrays import Arrays, Ints, arrays_of, peak_bytes, remove_dead
from memopt.solver.block_options import Choices, Option, choices_of
from memopt.solver.chain import Chain, ChainCosts, Table, chain_of, choose, fill, row
from memopt.solver.problem import RematProblem

# Plans are made for these multiples of the budget.
_SHARES = (1.0, 1.06, 1.15, 1.3)
# The most slots of memory in a table.
_SLOTS = 2000
# The most work of filling a table, blocks^3 / 6 times (slots + overhead): a third of a second.
_WORK, _OVERHEAD = 4e8, 50
_MOST_BLOCKS = 512


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


def _in_slots(chain: Chain, choices: list[Choices], slot_bytes: int) -> ChainCosts:
    """The chain's bytes in slots, rounded to the nearest so that errors cancel out over many blocks."""

    def slots(values: list[int] | Ints) -> Ints:
        return np.floor_divide(np.asarray(values, np.int64) + slot_bytes // 2, slot_bytes)

    options = [option for choice in choices for option in choice.options]
    bases = [choice.base_bytes for choice in choices for _ in choice.options]
    return ChainCosts(
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

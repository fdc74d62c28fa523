"""The table of nested chain plans, filled by compiled code.

`cost[row(s, t), m]` is the least seconds added by the forwards and backwards of blocks s … t with `m` slots of memory,
given the inputs of block s. If t is the last block, the forwards are first evaluations and add nothing; in all other
rows they are recomputations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.arrays import Floats, Ints, IntTable
from memopt.solver.native import is_compiled, native, native_part

Table = npt.NDArray[np.float32]


class ChainCosts(NamedTuple):
    """A chain in slots of memory and seconds. Block s has options start[s] … start[s+1] - 1.

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
    """The row of the table for blocks s … t."""
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

    It is c > s to run blocks s … c-1 saving nothing, -1 - option to run block s by an option, and s if nothing fits.
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
    """The cost of block s by an option, before blocks s+1 … t: slots needed, slots saved, seconds."""
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
    """The slots needed and seconds of a run of blocks s … c-1 that saves nothing, given those of blocks s … c-2."""
    block = c - 1
    held = costs.first_held[block] if t == costs.unsaved.size - 1 else costs.again_held[t]
    entering = costs.extra[s, block] if block > s else 0
    needs = max(needs, entering + costs.unsaved[block] + held)
    if t < costs.unsaved.size - 1:
        seconds += np.float32(costs.unsaved_seconds[block])
    return needs, seconds

"""The table of nested chain plans, filled by compiled code.

`cost[row(s, t), m]` is the least seconds added by the forwards and backwards of blocks s … t with `m` slots of memory,
given what enters block s. Where t is the last block the forwards are first evaluations, which are free; every other
stretch is run again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.solver.arrays import Floats, Ints, IntTable
from memopt.solver.native import is_compiled, native, native_part

Table = npt.NDArray[np.float32]


class ChainCosts(NamedTuple):
    """A chain in slots of memory and seconds. Block s has options start[s] … start[s+1] - 1."""

    start: Ints
    saved: Ints
    forward: Ints
    backward: Ints
    """With what is held anyway then."""
    alone: Ints
    seconds: Floats
    again_seconds: Floats
    alone_seconds: Floats
    unsaved: Ints
    """Per block."""
    unsaved_seconds: Floats
    first_held: Ints
    """Per block: held anyway during its first forward."""
    again_held: Ints
    """Per block t: held anyway just before its backward, when blocks up to it are run again."""
    extra: IntTable
    """[s, c]: what enters block c and not block s."""


@native
def row(s: int, t: int) -> int:
    """The place of blocks s … t in the table."""
    return t * (t + 1) // 2 + s


def _lower_in_a_loop(here: Table, first: Table, second: Table, seconds: np.float32) -> None:
    """Lower `here` to first + second + seconds where that is less; the three begin at the same memory."""
    for m in range(here.size):
        total = first[m] + second[m] + seconds
        here[m] = total if total < here[m] else here[m]


def _lower_at_once(here: Table, first: Table, second: Table, seconds: np.float32) -> None:
    np.minimum(here, first[: here.size] + second[: here.size] + seconds, out=here)


# Machine code runs the loop four times as fast as array expressions, which plain Python needs.
_lower = native_part(_lower_in_a_loop) if is_compiled() else _lower_at_once


@native
def fill(costs: ChainCosts, slots: int, cost: Table) -> None:
    """Fill rows of `slots` entries, which start infinite."""
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
    """What attains the least cost: c > s (run up to c unsaved), or -1 - option; s where nothing fits."""
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
    """Run block s by an option and go on with s+1 … t: slots needed, slots that it holds on to, seconds."""
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
    """Extend a run of blocks s … c-2 that saves nothing by block c-1: slots needed and seconds."""
    block = c - 1
    held = costs.first_held[block] if t == costs.unsaved.size - 1 else costs.again_held[t]
    entering = costs.extra[s, block] if block > s else 0
    needs = max(needs, entering + costs.unsaved[block] + held)
    if t < costs.unsaved.size - 1:
        seconds += np.float32(costs.unsaved_seconds[block])
    return needs, seconds

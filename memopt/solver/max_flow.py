"""The minimum cut of a network whose arcs cost seconds, by a maximum flow of integers.

The flow is found by pushing and relabelling (Goldberg and Tarjan, "A new approach to the maximum-flow problem", 1988),
first in first out, with all heights measured again by a breadth-first search after about as much work as that takes
(Cherkassky and Goldberg, 1997). The flow is pushed from the sink to the source, against the arcs: a node then lies on
the source's side exactly if the source still reaches it, and the algorithm's second half, which would take back what
never arrives, is not needed. Among all minimum cuts this is the one with the fewest nodes on the source's side.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Flags, Floats, Ints
from memopt.solver.native import native, native_part

# Finite capacities are scaled so that they sum to this: 2^-46 of the total is far below any op's share.
_FINITE_TOTAL = 2**46
# All infinite capacities together stay below this, so that no sum of flows leaves 64 bits.
_MOST = 2**62


class Arcs(NamedTuple):
    """The arcs of a flow network, each with one in the other direction, sorted by the node that they leave."""

    start: Ints
    """Per node: its first arc; one more entry ends the last node's."""
    heads: Ints
    """Per arc: the node that it enters."""
    partner: Ints
    """Per arc: the arc in the other direction."""


class FlowNetwork:
    """A network of given arcs, cut at as many costs as wanted. An arc that is named twice counts twice."""

    def __init__(self, tails: Ints, heads: Ints, nodes: int) -> None:
        count = len(tails)
        leaves, enters = np.concatenate([heads, tails]), np.concatenate([tails, heads])
        order = np.argsort(leaves, kind="stable")
        place = np.empty(2 * count, np.int64)
        place[order] = np.arange(2 * count)
        start = np.searchsorted(leaves[order], np.arange(nodes + 1)).astype(np.int64)
        self._arcs = Arcs(start, enters[order].astype(np.int64), place[(order + count) % max(2 * count, 1)])
        self._place = place[:count]
        self._nodes = nodes

    def cut(self, costs: Floats, source: int, sink: int) -> tuple[Flags, float]:
        """The nodes on the source's side of the cheapest cut, and a lower bound on its cost.

        `costs` has 0 or more for each arc; infinite forbids cutting it. The bound is below the cost by what rounding
        the costs down takes, 2^-46 of their sum for each arc at the most, and infinite if every cut is forbidden.
        """
        forbidden = np.isinf(costs)
        finite = np.where(forbidden, 0.0, costs)
        total = float(finite.sum())
        infinite = min(2 * _FINITE_TOTAL, _MOST // (1 + int(forbidden.sum())))
        scale = infinite / 2 / total if total > 0 else 1.0
        residual = np.zeros(len(self._arcs.heads), np.int64)
        residual[self._place] = np.where(forbidden, infinite, np.floor(finite * scale).astype(np.int64))
        heights, waiting = np.zeros(self._nodes, np.int64), np.zeros(self._nodes, np.bool_)
        excess, current, queue = (np.zeros(self._nodes, np.int64) for _ in range(3))
        flow = int(_push_to(source, sink, self._arcs, residual, heights, excess, current, queue, waiting))
        return heights < self._nodes, float("inf") if flow >= infinite else flow / scale


@native
def _push_to(
    goal: int,
    origin: int,
    arcs: Arcs,
    residual: Ints,
    heights: Ints,
    excess: Ints,
    current: Ints,
    queue: Ints,
    waiting: Flags,
) -> int:
    """The largest flow from `origin` to `goal`; `heights` then says how far the goal is, `len(heights)` if cut off.

    `residual` is what each arc can still take, and is changed. The other arrays have one entry a node and are scratch.
    """
    for arc in range(arcs.start[origin], arcs.start[origin + 1]):
        excess[arcs.heads[arc]] += residual[arc]
        residual[arcs.partner[arc]] += residual[arc]
        residual[arc] = 0
    _measure_heights(goal, origin, arcs, residual, heights, queue)
    count = _enqueue_active(goal, origin, arcs, heights, excess, current, queue, waiting)
    while count > 0:
        _discharge(goal, count, arcs, residual, heights, excess, current, queue, waiting)
        _measure_heights(goal, origin, arcs, residual, heights, queue)
        count = _enqueue_active(goal, origin, arcs, heights, excess, current, queue, waiting)
    return excess[goal]


@native_part
def _measure_heights(goal: int, origin: int, arcs: Arcs, residual: Ints, heights: Ints, queue: Ints) -> None:
    """Set each node's height to the number of arcs that lead from it to the goal; the number of nodes if none do."""
    start, heads, partner = arcs
    nodes = len(heights)
    heights[:] = nodes
    heights[goal] = 0
    queue[0] = goal
    first, last = 0, 1
    while first < last:
        node = queue[first]
        first += 1
        for arc in range(start[node], start[node + 1]):
            before = heads[arc]
            if before != origin and heights[before] == nodes and residual[partner[arc]] > 0:
                heights[before] = heights[node] + 1
                queue[last] = before
                last += 1


@native_part
def _enqueue_active(
    goal: int, origin: int, arcs: Arcs, heights: Ints, excess: Ints, current: Ints, queue: Ints, waiting: Flags
) -> int:
    """Put the nodes with flow that may still reach the goal in the queue, from its start; how many they are."""
    nodes = len(heights)
    count = 0
    for node in range(nodes):
        current[node] = arcs.start[node]
        waiting[node] = node != goal and node != origin and excess[node] > 0 and heights[node] < nodes
        if waiting[node]:
            queue[count] = node
            count += 1
    return count


@native_part
def _discharge(
    goal: int,
    count: int,
    arcs: Arcs,
    residual: Ints,
    heights: Ints,
    excess: Ints,
    current: Ints,
    queue: Ints,
    waiting: Flags,
) -> None:
    """Push flow and raise nodes until the queue is empty, or it is time to measure the heights again.

    The queue is a ring with `count` nodes from its start. One function, since calls with so many arrays cost as much as
    the work on a node.
    """
    start, heads, partner = arcs
    nodes = len(heights)
    work = 6 * nodes + len(residual) // 2
    first, last = 0, count if count < nodes else 0
    while count > 0 and work > 0:
        node = queue[first]
        first = first + 1 if first + 1 < nodes else 0
        count -= 1
        waiting[node] = False
        below, left, arc, end = heights[node] - 1, excess[node], current[node], start[node + 1]
        while arc < end:
            to = heads[arc]
            if residual[arc] > 0 and heights[to] == below:
                amount = min(left, residual[arc])
                residual[arc] -= amount
                residual[partner[arc]] += amount
                excess[to] += amount
                left -= amount
                if to != goal and not waiting[to]:
                    queue[last] = to
                    last = last + 1 if last + 1 < nodes else 0
                    waiting[to] = True
                    count += 1
                if left == 0:
                    break
            arc += 1
        excess[node] = left
        current[node] = arc
        if left == 0:
            continue
        lowest = nodes
        for arc in range(start[node], end):
            if residual[arc] > 0 and heights[heads[arc]] < lowest:
                lowest = heights[heads[arc]] + 1
        heights[node] = min(lowest, nodes)
        current[node] = start[node]
        work -= end - start[node] + 12
        if lowest < nodes:
            queue[last] = node
            last = last + 1 if last + 1 < nodes else 0
            waiting[node] = True
            count += 1

"""The minimum cut of a network whose arcs cost seconds, by a maximum flow of integers.

The flow is found by pushing and relabelling (Goldberg and Tarjan, "A new approach to the maximum-flow problem", 1988),
first in first out; whenever this has taken about as much work as a breadth-first search takes, such a search measures
all heights again (Cherkassky and Goldberg, 1997). The flow is pushed from the sink to the source, against the arcs: a
node then lies on the source's side exactly if the source still reaches it, and the algorithm's second half, which would
send back the flow that cannot arrive, is not needed. Among all minimum cuts this is the one with the fewest nodes on
the source's side.

By such cuts each node of a graph gets a label, 0 or 1, at the least total cost, optionally within a limit on a second
cost. Costs belong to pairs (i, j) of nodes: a pair is paid if i has label 0 and j has label 1. Two nodes have fixed
labels: ZERO has label 0 and ONE has label 1. So the pair (ZERO, i) is the cost of label 1 for i, and (i, ONE) the cost
of label 0. An infinite cost forbids the pair. A minimum cut minimises such sums exactly (Kolmogorov and Zabih, "What
energy functions can be minimized via graph cuts?", 2004): the network has an arc j → i for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Flags, Floats, Ints
from memopt.solver.native import native, native_part

# Finite capacities are scaled so that they sum to this: 2^-46 of the total is far below any op's share.
_FINITE_TOTAL = 2**46
# All infinite capacities together stay below this, so that no sum of flows leaves 64 bits.
_MOST = 2**62


class _Arcs(NamedTuple):
    """The arcs of a flow network, each with one in the other direction, sorted by the node that they leave."""

    start: Ints
    """Per node: its first arc; one more entry ends the last node's."""
    heads: Ints
    """Per arc: the node that it enters."""
    partner: Ints
    """Per arc: the arc in the other direction."""


class _Flow(NamedTuple):
    """The state of a flow."""

    residual: Ints
    """Per arc: the flow that it can still take (its residual capacity)."""
    heights: Ints
    """Per node: the number of arcs on the shortest path from it to the goal over arcs that can still take flow; the
    number of nodes if there is no such path."""
    excess: Ints
    """Per node: the flow that has arrived there and not left."""
    current: Ints
    """Per node: the arc at which the search for an arc to push over resumes."""
    queue: Ints
    """A ring of nodes with excess."""
    waiting: Flags
    """Per node: whether it is in the queue."""


class FlowNetwork:
    """A network with fixed arcs, which `cut` can cut again and again at other costs of the arcs. An arc that is listed
    twice counts twice."""

    def __init__(self, tails: Ints, heads: Ints, nodes: int) -> None:
        count = len(tails)
        leaves, enters = np.concatenate([heads, tails]), np.concatenate([tails, heads])
        order = np.argsort(leaves, kind="stable")
        place = np.empty(2 * count, np.int64)
        place[order] = np.arange(2 * count)
        start = np.searchsorted(leaves[order], np.arange(nodes + 1)).astype(np.int64)
        self._arcs = _Arcs(start, enters[order].astype(np.int64), place[(order + count) % max(2 * count, 1)])
        self._place = place[:count]
        self._nodes = nodes

    def cut(self, costs: Floats, source: int, sink: int) -> tuple[Flags, float]:
        """The nodes on the source's side of the cheapest cut, and a lower bound on its cost.

        `costs` has a number of 0 or more for each arc; an infinite one forbids cutting that arc. The bound is infinite
        if every cut is forbidden. Otherwise it differs from the cost only because costs are rounded down: by at most
        2^-46 of the sum of all finite costs for each arc in the cut, if fewer than 2^15 costs are infinite.
        """
        forbidden = np.isinf(costs)
        finite = np.where(forbidden, 0.0, costs)
        total = float(finite.sum())
        infinite = min(2 * _FINITE_TOTAL, _MOST // (1 + int(forbidden.sum())))
        scale = infinite / 2 / total if total > 0 else 1.0
        residual = np.zeros(len(self._arcs.heads), np.int64)
        residual[self._place] = np.where(forbidden, infinite, np.floor(finite * scale).astype(np.int64))
        heights, excess, current, queue = (np.zeros(self._nodes, np.int64) for _ in range(4))
        state = _Flow(residual, heights, excess, current, queue, np.zeros(self._nodes, np.bool_))
        flow = int(_push_to(source, sink, self._arcs, state))
        return heights < self._nodes, float("inf") if flow >= infinite else flow / scale


@native
def _push_to(goal: int, origin: int, arcs: _Arcs, flow: _Flow) -> int:
    """The largest flow from `origin` to `goal`, given the capacities as `flow.residual` and zeros for all else."""
    residual, excess = flow.residual, flow.excess
    for arc in range(arcs.start[origin], arcs.start[origin + 1]):
        excess[arcs.heads[arc]] += residual[arc]
        residual[arcs.partner[arc]] += residual[arc]
        residual[arc] = 0
    while True:
        _measure_heights(goal, origin, arcs, flow)
        count = _enqueue_active(goal, origin, arcs, flow)
        if count == 0:
            return excess[goal]
        _discharge(goal, count, arcs, flow)


@native_part
def _measure_heights(goal: int, origin: int, arcs: _Arcs, flow: _Flow) -> None:
    """Set each node's height (see `_Flow.heights`) by a breadth-first search from the goal."""
    start, heads, partner = arcs
    residual, heights, queue = flow.residual, flow.heights, flow.queue
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
def _enqueue_active(goal: int, origin: int, arcs: _Arcs, flow: _Flow) -> int:
    """Put the nodes with excess from which flow can still reach the goal in the queue; returns their number."""
    _, heights, excess, current, queue, waiting = flow
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
def _discharge(goal: int, count: int, arcs: _Arcs, flow: _Flow) -> None:
    """Push flow and raise nodes until the queue is empty, or it is time to measure the heights again.

    The queue is a ring with `count` nodes from its start. One function, since calls with so many arrays cost as much as
    the work on a node.
    """
    start, heads, partner = arcs
    residual, heights, excess, current, queue, waiting = flow
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


ZERO, ONE = 0, 1
# A new point counts only if it lies below the line through its neighbours by this share; less is rounding.
_TOLERANCE = 1e-9
# At this multiple of the ratio of costs to tolls, tolls outweigh costs; costs still decide between equal tolls.
_DEAR = 1e6


@dataclass(frozen=True)
class LabelProblem:
    """Pairs of nodes, each with a cost and with a toll: a second cost, whose sum can be limited."""

    nodes: int
    """The number of nodes, ZERO and ONE included."""
    zeros: Ints
    """Per pair: the node whose label is 0 if the pair is paid."""
    ones: Ints
    """Per pair: the node whose label is 1 if the pair is paid."""
    costs: Floats
    """Per pair: 0 or more; infinite forbids the pair."""
    tolls: Floats
    """Per pair: 0 or more and finite, in any unit."""

    def __post_init__(self) -> None:
        sizes = {len(column) for column in (self.zeros, self.ones, self.costs, self.tolls)}
        assert len(sizes) == 1, f"pairs of {sizes} lengths"
        assert (self.costs >= 0).all(), "a cost is negative; costs must be 0 or more"
        assert ((self.tolls >= 0) & np.isfinite(self.tolls)).all(), "a toll (second cost) is negative or not finite"

    @cached_property
    def _network(self) -> FlowNetwork:
        return FlowNetwork(self.ones, self.zeros, self.nodes)

    def cut(self, price: float) -> _Labels:
        """The labels of least `cost + price · toll`, found by a minimum cut; ties go to label 0. Raises `ValueError` if
        every labelling is forbidden."""
        labels, bound = self._network.cut(self.costs + price * self.tolls, ONE, ZERO)
        if np.isinf(bound):
            raise ValueError("forced labels contradict each other: every choice of labels pays an infinite cost")
        return labels_of(self, labels)


@dataclass(frozen=True)
class _Labels:
    """A labelling with its total cost and toll."""

    of: Flags
    """Per node: True for label 1."""
    cost: float
    toll: float


def labels_of(problem: LabelProblem, labels: Flags) -> _Labels:
    """The labels together with their cost and toll in the problem."""
    paid = ~labels[problem.zeros] & labels[problem.ones]
    return _Labels(labels, float(problem.costs[paid].sum()), float(problem.tolls[paid].sum()))


def cheapest_within(problem: LabelProblem, most_toll: float) -> _Labels:
    """The cheapest labels, among the vertices of the lower hull of cost and toll, whose toll is at most `most_toll`.

    If no labels have so small a toll, the labels with the smallest toll. The search cuts at the price at which two
    vertices of the hull cost the same (Eisner and Severance, 1976), and ends after a finite number of cuts at the edge
    of the hull that crosses the limit. Raises `ValueError` if every labelling is forbidden.
    """
    assert most_toll >= 0, f"most_toll, a limit on the sum of tolls (second costs), must be 0 or more, not {most_toll}"
    cheap = problem.cut(0.0)
    if cheap.toll <= most_toll:
        return cheap
    finite = problem.costs[np.isfinite(problem.costs)]
    frugal = problem.cut(_DEAR * max(float(finite.sum()), 1.0) / float(problem.tolls.sum()))
    while frugal.toll < most_toll:
        price = (frugal.cost - cheap.cost) / (cheap.toll - frugal.toll)
        if price <= 0:
            break
        middle = problem.cut(price)
        line = cheap.cost + price * cheap.toll
        if not frugal.toll < middle.toll < cheap.toll or middle.cost + price * middle.toll >= line * (1 - _TOLERANCE):
            break
        cheap, frugal = (middle, frugal) if middle.toll > most_toll else (cheap, middle)
    return frugal

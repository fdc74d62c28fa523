"""One of two labels for each node, at the least cost of all pairs: a minimum cut, and the cheapest within a limit.

A pair (i, j) costs something where i has label 0 and j has label 1, and nothing else does. Two nodes are given: ZERO
has label 0 and ONE has label 1, so that (ZERO, i) is what label 1 of i costs, and (i, ONE) what its label 0 costs; a
pair of infinite cost forbids. These are the energies that a minimum cut finds the least of exactly (Kolmogorov and
Zabih, "What energy functions can be minimized via graph cuts?", 2004): the network has an arc j → i for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.graph.python import max_flow

from memopt.solver.arrays import Flags, Floats, Ints

ZERO, ONE = 0, 1
# Finite capacities are scaled to sum to this: the least share that counts is 2^-46 of all costs together, and thousands
# of infinite arcs still add up to less than 2^63.
_FINITE_TOTAL = 2**46
_INFINITE = 2**47
# A new point must lie below the line through its neighbours by this share of their costs, else it is rounding.
_TOLERANCE = 1e-9
# At so many times the mean price the toll is all that counts, and costs still decide between equal tolls.
_DEAR = 1e6


@dataclass(frozen=True)
class LabelProblem:
    """Pairs of nodes by index, with what each costs and what it takes of a limited good, such as exactness."""

    nodes: int
    """With ZERO and ONE."""
    zeros: Ints
    """Of each pair the node that has label 0 where the pair counts; `ones` the other."""
    ones: Ints
    costs: Floats
    """None negative, infinite where a pair is forbidden."""
    tolls: Floats
    """None negative, all finite; in a unit of their own."""

    def __post_init__(self) -> None:
        sizes = {len(column) for column in (self.zeros, self.ones, self.costs, self.tolls)}
        assert len(sizes) == 1, f"pairs of {sizes} lengths"
        assert (self.costs >= 0).all(), "a cost is negative: the pair cannot be cut"
        assert ((self.tolls >= 0) & np.isfinite(self.tolls)).all(), "a toll is negative or infinite"

    def paid(self, labels: Flags) -> Flags:
        """Which pairs count under the labels (True for label 1) of all nodes."""
        return ~labels[self.zeros] & labels[self.ones]


@dataclass(frozen=True)
class Labels:
    """A label for each node, True for 1, with its cost and toll."""

    of: Flags
    cost: float
    toll: float


class LabelNetwork:
    """The network of a problem, built once and cut at many prices of the toll. Ties go to label 0."""

    def __init__(self, problem: LabelProblem) -> None:
        self.problem = problem
        self._flow = max_flow.SimpleMaxFlow()
        capacities = np.zeros(len(problem.costs), np.int64)
        self._arcs = self._flow.add_arcs_with_capacity(problem.ones, problem.zeros, capacities)
        # Both ends belong to the network, also where nothing touches them.
        self._flow.add_arc_with_capacity(ONE, ZERO, 0)

    def cut(self, price: float) -> Labels:
        """The labels of least `cost + price · toll`. Raises ValueError where every choice is forbidden."""
        problem = self.problem
        forbidden = np.isinf(problem.costs)
        amounts = np.where(forbidden, 0.0, problem.costs) + price * problem.tolls
        total = float(amounts.sum())
        scale = _FINITE_TOTAL / total if total > 0 else 1.0
        capacities = np.where(forbidden, _INFINITE, np.floor(amounts * scale)).astype(np.int64)
        self._flow.set_arcs_capacity(self._arcs, capacities)
        status = self._flow.solve(ONE, ZERO)
        assert status == self._flow.OPTIMAL, f"maximum flow ended with {status}"
        if self._flow.optimal_flow() >= _INFINITE:
            raise ValueError("forced labels contradict each other: no labels cost a finite sum")
        labels = np.zeros(problem.nodes, np.bool_)
        labels[self._flow.get_source_side_min_cut()] = True
        return labels_of(problem, labels)


def labels_of(problem: LabelProblem, labels: Flags) -> Labels:
    """Given labels with their cost and toll."""
    paid = problem.paid(labels)
    return Labels(labels, float(problem.costs[paid].sum()), float(problem.tolls[paid].sum()))


def cheapest_within(problem: LabelProblem, most_toll: float) -> Labels:
    """The cheapest labels of the lower hull of cost against toll whose toll is at most `most_toll`.

    Where the least toll of all is more than that, the labels that have it. Between two vertices of the hull the price
    is that at which both cost the same (Eisner and Severance, 1976), so that the search ends after a finite number of
    cuts, at the edge of the hull that crosses the limit. Raises ValueError where every choice is forbidden.
    """
    assert most_toll >= 0, f"a limit of {most_toll}: no tolls are negative"
    network = LabelNetwork(problem)
    cheap = network.cut(0.0)
    if cheap.toll <= most_toll:
        return cheap
    finite = problem.costs[np.isfinite(problem.costs)]
    frugal = network.cut(_DEAR * max(float(finite.sum()), 1.0) / float(problem.tolls.sum()))
    while frugal.toll < most_toll:
        price = (frugal.cost - cheap.cost) / (cheap.toll - frugal.toll)
        if price <= 0:
            break
        middle = network.cut(price)
        line = cheap.cost + price * cheap.toll
        if not frugal.toll < middle.toll < cheap.toll or middle.cost + price * middle.toll >= line * (1 - _TOLERANCE):
            break
        cheap, frugal = (middle, frugal) if middle.toll > most_toll else (cheap, middle)
    return frugal

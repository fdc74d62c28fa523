"""Labels each node 0 or 1 at the least total cost, by a minimum cut, and optionally within a limit on a second cost.

Costs belong to pairs (i, j) of nodes: a pair is paid if i has label 0 and j has label 1. Two nodes have fixed labels:
ZERO has label 0 and ONE has label 1. So the pair (ZERO, i) is the cost of label 1 for i, and (i, ONE) the cost of label
0. An infinite cost forbids the pair. A minimum cut minimises such sums exactly (Kolmogorov and Zabih, "What energy
functions can be minimized via graph cuts?", 2004): the network has an arc j → i for each pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Flags, Floats, Ints
from memopt.solver.max_flow import FlowNetwork

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
        assert (self.costs >= 0).all(), "a cost is negative: the pair cannot be cut"
        assert ((self.tolls >= 0) & np.isfinite(self.tolls)).all(), "a toll is negative or infinite"

    def paid(self, labels: Flags) -> Flags:
        """Per pair: whether it is paid, given every node's label (True for 1)."""
        return ~labels[self.zeros] & labels[self.ones]


@dataclass(frozen=True)
class Labels:
    """A labelling with its total cost and toll."""

    of: Flags
    """Per node: True for label 1."""
    cost: float
    toll: float


class LabelNetwork:
    """The flow network of a problem, built once and cut at many prices of the toll. Ties go to label 0."""

    def __init__(self, problem: LabelProblem) -> None:
        self.problem = problem
        self._flow = FlowNetwork(problem.ones, problem.zeros, problem.nodes)

    def cut(self, price: float) -> Labels:
        """The labels of least `cost + price · toll`. Raises `ValueError` if every labelling is forbidden."""
        problem = self.problem
        labels, bound = self._flow.cut(problem.costs + price * problem.tolls, ONE, ZERO)
        if np.isinf(bound):
            raise ValueError("forced labels contradict each other: no labels cost a finite sum")
        return labels_of(problem, labels)


def labels_of(problem: LabelProblem, labels: Flags) -> Labels:
    """The labels together with their cost and toll in the problem."""
    paid = problem.paid(labels)
    return Labels(labels, float(problem.costs[paid].sum()), float(problem.tolls[paid].sum()))


def cheapest_within(problem: LabelProblem, most_toll: float) -> Labels:
    """The cheapest labels, among the vertices of the lower hull of cost and toll, whose toll is at most `most_toll`.

    If no labels have so small a toll, the labels with the smallest toll. The search cuts at the price at which two
    vertices of the hull cost the same (Eisner and Severance, 1976), and ends after a finite number of cuts at the edge
    of the hull that crosses the limit. Raises `ValueError` if every labelling is forbidden.
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

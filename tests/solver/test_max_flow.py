import random

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solver.max_flow import FlowNetwork

Arc = tuple[int, int, float]


def cut_of(arcs: list[Arc], nodes: int, source: int = 0, sink: int = 1) -> tuple[set[int], float]:
    """The source's side and the bound of the cheapest cut."""
    tails, heads, costs = (np.array(column) for column in zip(*arcs, strict=True))
    side, bound = FlowNetwork(tails, heads, nodes).cut(costs.astype(float), source, sink)
    return set(np.flatnonzero(side).tolist()), bound


def cost_of(arcs: list[Arc], side: set[int]) -> float:
    return sum(cost for tail, head, cost in arcs if tail in side and head not in side)


def random_arcs(state: random.Random, nodes: int) -> list[Arc]:
    """Arcs between random nodes, many of them double or of no cost; infinite ones only leave the source."""
    arcs: list[Arc] = [(0, state.randrange(2, nodes), float("inf"))]
    for _ in range(state.randint(1, 4 * nodes)):
        arcs.append((state.randrange(nodes), state.randrange(nodes), state.choice([0, 1, 2.5, state.uniform(0, 9)])))
    return arcs


@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_is_the_cheapest_cut_with_the_fewest_nodes(number: int) -> None:
    state = random.Random(number)
    nodes = state.randint(3, 14)
    arcs = random_arcs(state, nodes)
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    for tail, head, cost in arcs:
        known = graph.get_edge_data(tail, head, {"capacity": 0.0})["capacity"]
        graph.add_edge(tail, head, capacity=known + (1e6 if cost == float("inf") else round(cost * 2**20) / 2**20))
    rounded = [(tail, head, graph[tail][head]["capacity"]) for tail, head in graph.edges]
    value, (_, far) = networkx.minimum_cut(graph, 0, 1)
    side, bound = cut_of(arcs, nodes)
    assert 0 in side
    assert 1 not in side
    assert cost_of(rounded, side) == pytest.approx(value, abs=1e-4)
    assert bound <= cost_of(arcs, side) * (1 + 1e-12)
    assert bound == pytest.approx(cost_of(arcs, side), rel=1e-9, abs=1e-9)
    assert side <= set(range(nodes)) - far or cost_of(arcs, side) < value


def test_of_equal_cuts_the_source_has_the_fewest_nodes() -> None:
    arcs = [(0, 2, 1.0), (2, 3, 1.0), (3, 1, 1.0)]
    assert cut_of(arcs, 4) == ({0}, pytest.approx(1.0))


def test_nodes_without_arcs_are_on_the_other_side() -> None:
    assert cut_of([(0, 1, 3.0)], 5) == ({0}, pytest.approx(3.0))


def test_a_cut_that_is_forbidden_has_no_bound() -> None:
    assert cut_of([(0, 2, float("inf")), (2, 1, float("inf")), (0, 1, 1.0)], 3)[1] == float("inf")


def test_a_hundred_thousand_forbidden_arcs_do_not_leave_64_bits() -> None:
    many = range(3, 100_003)
    arcs = [arc for node in many for arc in ((0, node, float("inf")), (node, 2, float("inf")))]
    assert cut_of([*arcs, (2, 1, 7.0)], 100_003) == ({0, 2, *many}, pytest.approx(7.0))
    assert cut_of([(head, tail, cost) for tail, head, cost in [*arcs, (2, 1, 7.0)]], 100_003, 1, 0) == (
        {1},
        pytest.approx(7.0),
    )


def test_is_cut_again_at_other_costs() -> None:
    network = FlowNetwork(np.array([0, 2]), np.array([2, 1]), 3)
    for costs, side in (([1.0, 2.0], [0]), ([2.0, 1.0], [0, 2]), ([1.0, 2.0], [0])):
        assert np.flatnonzero(network.cut(np.array(costs), 0, 1)[0]).tolist() == side


def test_a_long_chain_is_cut_at_its_cheapest_arc() -> None:
    length = 20_000
    arcs = [(0, 2, float("inf")), (length + 1, 1, 3.0)]
    arcs += [(node, node + 1, 2.0 if node == 10_000 else 5.0) for node in range(2, length + 1)]
    assert cut_of(arcs, length + 2) == ({0, *range(2, 10_001)}, pytest.approx(2.0))

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solver.max_flow import ONE, ZERO, LabelProblem, _Labels, cheapest_within, labels_of

INFINITE = math.inf


def problem_of(nodes: int, *pairs: tuple[int, int, float, float]) -> LabelProblem:
    zeros, ones, costs, tolls = (np.array(column) for column in zip(*pairs, strict=True))
    return LabelProblem(nodes, zeros, ones, costs.astype(float), tolls.astype(float))


def random_problem(number: int) -> LabelProblem:
    """Up to six free nodes; forbidden pairs only towards label 1, so that all of label 0 is always allowed."""
    state = random.Random(number)
    nodes = 2 + state.randint(1, 6)
    pairs = []
    for node in range(2, nodes):
        pairs += [(ZERO, node, state.choice([0, 1, 5, INFINITE]) * 1.0, state.randint(0, 9) * 1.0)]
        pairs += [(node, ONE, state.uniform(0, 9), state.choice([0, 0, 1]) * 1.0)]
    for _ in range(state.randint(0, 10)):
        one, other = state.randrange(nodes), state.randrange(2, nodes)
        cost = INFINITE if one >= 2 and state.random() < 0.2 else state.uniform(0, 5)
        pairs.append((one, other, cost, state.randint(0, 3) * 1.0))
    return problem_of(nodes, *pairs)


def all_labels(problem: LabelProblem) -> Iterator[_Labels]:
    for choice in itertools.product([False, True], repeat=problem.nodes - 2):
        yield labels_of(problem, np.array([False, True, *choice]))


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-3, 0.4, 1.0, 1e3]))
def test_is_the_cheapest_of_all(number: int, price: float) -> None:
    problem = random_problem(number)
    found = problem.cut(price)
    cheapest = min(labels.cost + price * labels.toll for labels in all_labels(problem))
    assert found.cost + price * found.toll == pytest.approx(cheapest, rel=1e-9, abs=1e-9)
    assert not found.of[ZERO]
    assert found.of[ONE]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.floats(0, 30))
def test_within_a_limit_is_on_the_hull(number: int, most_toll: float) -> None:
    problem = random_problem(number)
    known = list(all_labels(problem))
    found = cheapest_within(problem, most_toll)
    least = min(labels.toll for labels in known if math.isfinite(labels.cost))
    assert found.toll <= max(most_toll, least) + 1e-9
    # No pair of other choices, mixed so that their mean toll is no more than this one's, is cheaper.
    for one, other in itertools.product(known, repeat=2):
        if one.toll <= found.toll < other.toll and math.isfinite(one.cost + other.cost):
            share = (found.toll - one.toll) / (other.toll - one.toll)
            assert found.cost <= one.cost + share * (other.cost - one.cost) + 1e-6
    # Unless something cheaper lies beyond the limit, it is the cheapest there is.
    if found.cost > min(labels.cost for labels in known) + 1e-6:
        assert any(labels.toll > most_toll and labels.cost < found.cost for labels in known) or found.toll == least


def test_chain_changes_labels_where_it_is_cheapest() -> None:
    """The first of four wants 0, the last 1; a change costs 3, 1, 2."""
    free = [(2, 3), (3, 4), (4, 5)]
    changes = [(one, other, cost, 0.0) for (one, other), cost in zip(free, (3.0, 1.0, 2.0), strict=True)]
    problem = problem_of(6, (ZERO, 2, INFINITE, 0), (5, ONE, INFINITE, 0), *changes)
    assert problem.cut(1.0).of.tolist() == [False, True, False, False, True, True]


def test_ties_go_to_label_0() -> None:
    problem = problem_of(3, (ZERO, 2, 1.0, 0), (2, ONE, 1.0, 0))
    assert problem.cut(0.0).of.tolist() == [False, True, False]


def test_a_limit_is_paid_for() -> None:
    """Label 1 saves 5 of cost at a toll of 1 (node 2), and 4 at a toll of 2 (node 3)."""
    problem = problem_of(4, (2, ONE, 5.0, 0), (ZERO, 2, 0.0, 1.0), (3, ONE, 4.0, 0), (ZERO, 3, 0.0, 2.0))
    found = [cheapest_within(problem, limit) for limit in (0.0, 0.9, 1.0, 2.9, 3.0)]
    assert [(labels.cost, labels.toll) for labels in found] == [(9, 0), (9, 0), (4, 1), (4, 1), (0, 3)]


def test_contradictions_are_refused() -> None:
    problem = problem_of(3, (ZERO, 2, INFINITE, 0), (2, ONE, INFINITE, 0))
    with pytest.raises(ValueError, match="forced labels contradict each other"):
        problem.cut(1.0)


def test_microseconds_and_hours_stay_apart() -> None:
    problem = problem_of(4, (2, ONE, 3600.0, 0), (ZERO, 2, 1.0, 0), (3, ONE, 2e-6, 0), (ZERO, 3, 1e-6, 0))
    assert problem.cut(0.0).of.tolist() == [False, True, True, True]

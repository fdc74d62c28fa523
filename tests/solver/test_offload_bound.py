import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, transformer
from memopt.solver.lower_bound import LowerBound, floor_bytes, floor_of
from memopt.solver.problem import Link, Schedule
from memopt.solver.simulator import simulate
from tests.solver.offloading import random_offloads

LINKS = [Link(0.0), Link(0.3), Link(3.0), Link(30.0, 0.1), Link(math.inf), Link(math.inf, 0.2, 40), Link(20.0, 0.0, 25)]


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.sampled_from(LINKS))
def test_no_schedule_goes_below_it(number: int, link: Link) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    plain = random_schedule(state, problem)
    schedule = Schedule(plain.evaluations, random_offloads(state, problem, plain))
    try:
        simulation = simulate(problem, schedule, link)
    except ValueError:  # no room on the host
        simulation = simulate(problem, plain)
    assert simulation.peak_bytes >= floor_of(problem, offloading=True)[0]
    assert LowerBound(problem).added_seconds(simulation.peak_bytes, link) <= simulation.added_seconds + 1e-9


def test_without_bandwidth_it_is_at_least_the_bound_without_offload() -> None:
    problem = transformer(2)
    peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
    for share in (0.9, 0.7, 0.5):
        budget_bytes = int(share * peak)
        without = LowerBound(problem).added_seconds(budget_bytes)
        assert LowerBound(problem).added_seconds(budget_bytes, Link(0.0)) >= without > 0.0


def test_a_faster_link_lowers_it() -> None:
    """Within a few percent, since each link has moments of its own looked at."""
    problem = transformer(3)
    budget_bytes = int(0.6 * simulate(problem, Schedule.save_all(problem)).peak_bytes)
    bound = LowerBound(problem)
    values = [bound.added_seconds(budget_bytes, Link(speed)) for speed in (0.0, 5e9, 2e10, 1e11, 1e12, math.inf)]
    assert all(after <= before * 1.03 + 1e-9 for before, after in itertools.pairwise(values))
    assert values[0] > 0.0
    assert values[-1] == 0.0


def test_a_chain_by_hand() -> None:
    """Of ten values of 10 bytes and a second each, at 60 bytes 3.6 are kept when the last gradient is made."""
    problem = chain(10)
    assert LowerBound(problem).added_seconds(60, Link(0.0)) == pytest.approx(8 - 3.6)
    # 10 seconds before that moment move 20 bytes over a link of 2 bytes a second: the time of two values.
    assert LowerBound(problem).added_seconds(60, Link(2.0)) == pytest.approx(8 - 3.6 - 2.1, abs=0.11)


def test_the_floor_is_what_one_op_needs_alone() -> None:
    problem = chain(10)
    assert floor_of(problem, offloading=True)[0] == 30 <= floor_bytes(problem)  # two gradients and a value

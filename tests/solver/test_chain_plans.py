import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, transformer
from memopt.solver.arrays import to_schedule
from memopt.solver.chain_plans import NestedChain
from memopt.solver.lower_bound import floor_bytes
from memopt.solver.portfolio import Portfolio
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate
from tests.solver.reference import revolve


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 13])
def test_a_uniform_chain_costs_what_revolve_says(slots: int) -> None:
    problem = chain(41)
    # Beside the slots: two gradients and the value at work. Of the 41 steps the first needs no gradient, and reads
    # nothing; the first pass, of 40 steps, is free.
    budget_bytes = 10 * (slots + 3)
    table = NestedChain(problem).table(budget_bytes)
    assert table is not None
    evaluations = table.plan(budget_bytes)
    assert evaluations is not None
    simulation = simulate(problem, to_schedule(evaluations))
    assert simulation.peak_bytes <= budget_bytes
    assert simulation.added_seconds == revolve(41, slots) - 40
    assert Portfolio(problem).solve(budget_bytes).added_seconds <= simulation.added_seconds


@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_every_cap_of_the_table_has_a_plan_that_is_a_schedule(number: int, share: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(2, 20))
    floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
    cap_bytes = int(floor + share * (peak - floor))
    table = NestedChain(problem).table(cap_bytes)
    if table is None or table.smallest_cap_bytes is None:
        return
    caps = sorted({table.smallest_cap_bytes, (table.smallest_cap_bytes + cap_bytes) // 2, cap_bytes})
    plans = [plan for cap in caps if cap <= cap_bytes and (plan := table.plan(cap)) is not None]
    assert len(plans) == sum(cap <= cap_bytes for cap in caps)
    for plan in plans:
        assert simulate(problem, to_schedule(plan)).seconds >= problem.seconds - 1e-9


@pytest.mark.parametrize("layers", [4, 12])
def test_a_larger_cap_never_makes_the_plan_slower(layers: int) -> None:
    problem = transformer(layers)
    cap_bytes = simulate(problem, Schedule.save_all(problem)).peak_bytes
    table = NestedChain(problem).table(cap_bytes)
    assert table is not None
    assert table.smallest_cap_bytes is not None
    caps = [int(table.smallest_cap_bytes + k / 12 * (cap_bytes - table.smallest_cap_bytes)) for k in range(13)]
    plans = [table.plan(cap) for cap in caps]
    added = [simulate(problem, to_schedule(plan)).added_seconds for plan in plans if plan is not None]
    assert len(added) == len(caps)
    assert added == sorted(added, reverse=True)
    assert added[0] > added[6] > added[12]


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_peaks_on_a_transformer_are_near_the_cap(share: float) -> None:
    problem = transformer(12)
    cap_bytes = int(share * simulate(problem, Schedule.save_all(problem)).peak_bytes)
    table = NestedChain(problem).table(cap_bytes)
    assert table is not None
    plan = table.plan(cap_bytes)
    assert plan is not None
    simulation = simulate(problem, to_schedule(plan))
    assert 0.8 * cap_bytes <= simulation.peak_bytes <= 1.01 * cap_bytes
    assert table.plan(floor_bytes(problem) // 2) is None


def test_a_forward_that_cannot_be_cut_has_no_table() -> None:
    problem = chain(1)
    assert NestedChain(problem).table(10**6) is None

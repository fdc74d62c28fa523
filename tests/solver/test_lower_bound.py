import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, transformer
from memopt.solver.lower_bound import LowerBound, floor_bytes, floor_of
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate
from tests.solver.reference import optimum


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_never_above_the_optimum(number: int, share: float) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 4))
    floor, peak = floor_bytes(problem), simulate(problem, Schedule.save_all(problem)).peak_bytes
    budget_bytes = int(floor + share * (peak - floor))
    try:
        least = optimum(problem, budget_bytes, most_states=8_000)
    except OverflowError:
        return
    if least is not None:
        assert LowerBound(problem).added_seconds(budget_bytes) <= least + 1e-9


@given(st.integers(0, 10**6))
def test_no_schedule_goes_below_the_floor_or_the_bound(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    simulation = simulate(problem, random_schedule(state, problem))
    assert simulation.peak_bytes >= floor_bytes(problem)
    assert LowerBound(problem).added_seconds(simulation.peak_bytes) <= simulation.added_seconds + 1e-9


def test_what_it_was_asked_before_changes_nothing() -> None:
    problem = transformer(3)
    peak, floor = simulate(problem, Schedule.save_all(problem)).peak_bytes, floor_bytes(problem)
    used = LowerBound(problem)
    budgets = range(floor, peak, (peak - floor) // 40)
    for budget_bytes in budgets:
        used.added_seconds(budget_bytes)
    vertices = sorted({p.base_bytes + end.saved_bytes for p in used._known.values() for end in p.points})
    fresh = [LowerBound(problem).added_seconds(budget_bytes) for budget_bytes in vertices]
    assert [used.added_seconds(budget_bytes) for budget_bytes in vertices] == pytest.approx(fresh, rel=1e-9, abs=1e-15)
    assert fresh == sorted(fresh, reverse=True)


def test_a_chain() -> None:
    problem = chain(10)
    bound = LowerBound(problem)
    assert bound.added_seconds(simulate(problem, Schedule.save_all(problem)).peak_bytes) == 0.0
    assert bound.added_seconds(floor_bytes(problem) - 1) == float("inf")
    values = [bound.added_seconds(budget) for budget in range(floor_bytes(problem), 130, 10)]
    assert values == sorted(values, reverse=True)
    # 9.grad reads 4 and 10 bytes and makes 10; the other 36 of 60 bytes hold 3.6 of the 8 values that are read later.
    assert bound.added_seconds(60) == pytest.approx(8 - 3.6)


def test_what_it_learnt_at_one_budget_does_not_change_another() -> None:
    problem = transformer(2)
    peak = simulate(problem, Schedule.save_all(problem)).peak_bytes
    budgets = [int(peak * share) for share in (0.9, 0.5, 0.7, 0.6, 0.45)]
    used = LowerBound(problem)
    assert [used.added_seconds(b) for b in budgets] == pytest.approx(
        [LowerBound(problem).added_seconds(b) for b in budgets]
    )


def test_the_floor_names_its_op() -> None:
    problem = transformer(2)
    floor, op = floor_of(problem)
    assert floor == floor_bytes(problem)
    assert problem.ops[op].name == "0.gelu.grad"

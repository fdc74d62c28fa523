import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, random_schedule, text
from memopt.solver.arrays import added_seconds, arrays_of, live_bytes, remove_dead, to_array, to_schedule
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate


@given(st.integers(0, 10**6))
def test_the_compiled_count_agrees_with_the_simulator(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    schedule = random_schedule(state, problem)
    arrays, simulation = arrays_of(problem), simulate(problem, schedule)
    assert live_bytes(arrays, to_array(schedule)).tolist() == simulation.live_bytes.tolist()
    assert added_seconds(arrays, to_array(schedule)) == pytest.approx(simulation.added_seconds)


@given(st.integers(0, 10**6))
def test_removing_the_dead_never_costs(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    schedule = random_schedule(state, problem)
    after = simulate(problem, to_schedule(remove_dead(arrays_of(problem), to_array(schedule))))
    before = simulate(problem, schedule)
    assert after.peak_bytes <= before.peak_bytes
    assert after.added_seconds <= before.added_seconds


def test_what_only_the_dead_read_is_dead() -> None:
    problem = chain(3)
    wasteful = Schedule((0, 1, 2, 0, 1, 3, 0, 4, 5))
    assert text(problem, wasteful) == "0 1 2 (0) (1) loss.grad (0) 2.grad 1.grad"
    tidy = to_schedule(remove_dead(arrays_of(problem), to_array(wasteful)))
    assert text(problem, tidy) == "0 1 2 (0) (1) loss.grad (0) 2.grad 1.grad"

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import random_problem, random_schedule
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.simulator import simulate
from tests.solver.reference import naive_live_bytes


@given(st.integers(0, 10**6))
def test_agrees_with_a_naive_count(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 8))
    schedule = random_schedule(state, problem)
    simulation = simulate(problem, schedule)
    assert simulation.live_bytes.tolist() == naive_live_bytes(problem, schedule)
    if schedule.evaluations:
        assert simulation.live_bytes[simulation.peak_position] == simulation.peak_bytes == max(simulation.live_bytes)
    assert simulation.seconds == pytest.approx(problem.seconds + simulation.added_seconds)


def small() -> RematProblem:
    """a makes 10 and a kept 3; b reads the 10; c reads both of them."""
    storages = (Storage("a0", 10), Storage("a1", 3, kept=True), Storage("b0", 5), Storage("c0", 1, kept=True))
    ops = (
        Op("a", 1.0, (), (0, 1)),
        Op("b", 2.0, (0,), (2,), workspace_bytes=100),
        Op("c", 4.0, (0, 2), (3,)),
    )
    return RematProblem(ops, storages, forward_ops=2, resident_bytes=1000)


def test_counts_workspace_resident_and_kept() -> None:
    simulation = simulate(small(), Schedule((0, 1, 2)))
    assert simulation.live_bytes.tolist() == [1013, 1118, 1019]
    assert (simulation.peak_bytes, simulation.peak_position, simulation.seconds) == (1118, 1, 7.0)


def test_a_second_version_of_a_kept_storage_is_one_more() -> None:
    simulation = simulate(small(), Schedule((0, 1, 0, 2)))
    assert simulation.live_bytes.tolist() == [1013, 1118, 1000 + 3 + 10 + 3 + 5, 1019]
    assert simulation.added_seconds == 1.0


def test_an_unread_version_dies_at_once() -> None:
    simulation = simulate(small(), Schedule((0, 1, 1, 2)))
    assert simulation.live_bytes.tolist() == [1013, 1118, 1118, 1019]


def test_an_empty_schedule_holds_what_is_resident() -> None:
    assert simulate(RematProblem((), (), 0, 7), Schedule(())).peak_bytes == 7


@pytest.mark.parametrize("evaluations", [(0, 2, 1), (0, 1), (0, 1, 2, 2)])
def test_refuses_what_is_not_a_schedule(evaluations: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="evalua"):
        simulate(small(), Schedule(evaluations))

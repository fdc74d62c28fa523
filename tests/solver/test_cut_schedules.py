"""The minimum cut as a solver."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from examples.models.problems import chain, random_problem, text, transformer
from memopt.solver.min_cut import CutNetwork, just_in_time, lower_hull
from memopt.solver.problem import Schedule
from memopt.solver.simulator import simulate


def test_more_saved_bytes_cost_fewer_seconds_up_to_saving_all() -> None:
    problem = transformer(3)
    schedules = [just_in_time(problem, cut.saved) for cut in lower_hull(CutNetwork(problem))]
    added = [simulate(problem, schedule).added_seconds for schedule in schedules]
    assert all(more > less for more, less in pairwise(added))
    assert schedules[-1] == Schedule.save_all(problem)


def test_a_chain_from_its_middle() -> None:
    problem = chain(6)
    assert_expected_inline(
        text(problem, just_in_time(problem, {2})),
        """0 1 2 3 4 5 loss.grad (3) (4) 5.grad 4.grad 3.grad (0) (1) 2.grad 1.grad""",
    )


def test_a_chain_from_nothing() -> None:
    problem = chain(4)
    assert_expected_inline(
        text(problem, just_in_time(problem, ())), """0 1 2 3 loss.grad (0) (1) (2) 3.grad 2.grad 1.grad"""
    )


def test_a_long_chain_needs_no_python_stack() -> None:
    problem = chain(3000)
    assert just_in_time(problem, ()).added_seconds(problem) == 2999.0


@given(st.integers(0, 10**6))
def test_recomputes_what_the_cut_says_and_no_more(number: int) -> None:
    state = random.Random(number)
    problem = random_problem(state, state.randint(1, 12))
    for cut in lower_hull(CutNetwork(problem)):
        schedule = just_in_time(problem, cut.saved)
        schedule.check(problem)
        assert schedule.added_seconds(problem) == pytest.approx(cut.recompute_seconds)
        assert all(again == 1 for again in schedule.recomputed().values())

"""The one schedule that keeps everything."""

from __future__ import annotations

import pytest

from examples.models.problems import chain
from memopt.solver import Infeasible, SaveAll, Schedule, simulate


def test_it_is_what_the_simulator_says_of_it() -> None:
    problem = chain(6)
    schedule = Schedule.save_all(problem)
    peak_bytes = simulate(problem, schedule).peak_bytes
    portfolio = SaveAll(problem)
    solution = portfolio.solve(peak_bytes)
    assert (solution.schedule, solution.peak_bytes, solution.added_seconds) == (schedule, peak_bytes, 0.0)
    assert portfolio.smallest() == solution
    assert [baseline.name for baseline in portfolio.baselines()] == ["save all"]


def test_a_byte_less_is_infeasible() -> None:
    portfolio = SaveAll(chain(6))
    with pytest.raises(Infeasible) as error:
        portfolio.solve(portfolio.smallest().peak_bytes - 1)
    assert error.value.smallest_peak_bytes == portfolio.smallest().peak_bytes

"""The minimum cut as a solver."""

from __future__ import annotations

from itertools import pairwise

from examples.models.problems import transformer
from memopt.solver.cut_schedules import MinimumCut
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate


def test_more_saved_bytes_cost_fewer_seconds_up_to_saving_all() -> None:
    problem = transformer(3)
    solver = MinimumCut()
    schedules = solver.candidates(problem, 0)
    added = [simulate(problem, schedule).added_seconds for schedule in schedules]
    assert all(more > less for more, less in pairwise(added))
    assert schedules[-1] == Schedule.save_all(problem)
    assert solver.candidates(problem, 10**12) is schedules

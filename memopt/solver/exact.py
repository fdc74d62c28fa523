"""The reference for small problems: the best schedule of a wide class, by mixed-integer programming.

A stage is what happens between two first evaluations: ops are evaluated again in program order, each at most once in a
stage, then comes the stage's own op. As in Checkmate (Jain et al., 2020, section 4), with three changes: the live bytes
inside a stage are exact, only the backward has stages unless the forward needs them to fit, and "closure cuts" tie
what is held at a moment to what is evaluated again after it, without which the relaxation is too weak to prove much.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import arrays_of
from memopt.solver.liveness import remove_dead, to_schedule
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate
from memopt.solver.stage_model import StageModel


@dataclass(frozen=True)
class ExactResult:
    """What the reference found."""

    schedule: Schedule | None
    """Within the budget; None where none was found."""
    added_seconds: float
    """Of the schedule; infinite without one."""
    bound_seconds: float
    """No schedule of stages adds less."""
    proven: bool
    """The search was completed: the schedule is optimal within the gap, or without one none exists."""


def solve_exactly(
    problem: RematProblem,
    budget_bytes: int,
    *,
    seconds: float = 60.0,
    gap_seconds: float | None = None,
    below_seconds: float | None = None,
    nodes: int | None = None,
) -> ExactResult:
    """The fastest schedule of stages with a peak of at most `budget_bytes`, within `seconds` of wall time.

    `nodes` limits the search tree instead, so that what is found is the same in every run.

    The search ends when the best is within `gap_seconds` of the bound (1e-4 of the step unless given). Schedules that
    add more than `below_seconds` are not looked for.
    """
    gap = 1e-4 * problem.seconds if gap_seconds is None else gap_seconds
    if problem.forward_ops == len(problem.ops):
        fits = simulate(problem, Schedule.save_all(problem)).peak_bytes <= budget_bytes
        return ExactResult(Schedule.save_all(problem), 0.0, 0.0, True) if fits else _nothing
    staged = StageModel(problem, budget_bytes)
    if staged.impossible:
        return _nothing
    unit = problem.seconds or 1.0
    if below_seconds is not None:
        staged.model.cost_at_most(below_seconds / unit)
    values, bound, complete = staged.model.solve(seconds, gap, nodes)
    if values is None:
        return ExactResult(None, float("inf"), bound * unit, complete)
    schedule = to_schedule(remove_dead(arrays_of(problem), np.array(staged.evaluations(values), np.int64)))
    simulation = simulate(problem, schedule)
    if simulation.peak_bytes > budget_bytes:  # a second version of a kept storage outlived its making
        return ExactResult(None, float("inf"), bound * unit, False)
    return ExactResult(schedule, simulation.added_seconds, bound * unit, complete)


_nothing = ExactResult(None, float("inf"), float("inf"), True)


@dataclass(frozen=True)
class Exact:
    """Proposes the reference's schedule for problems of at most `most_forward_ops`, and nothing for larger ones.

    `nodes` limits the search tree, so that the schedule is the same in every run.
    """

    name: str = "exact"
    most_forward_ops: int = 24
    nodes: int = 300

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        if problem.forward_ops > self.most_forward_ops:
            return []
        found = solve_exactly(problem, budget_bytes, nodes=self.nodes).schedule
        return [] if found is None else [found]

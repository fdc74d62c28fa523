"""The exact solver for small problems: the best schedule of a wide class, by mixed-integer programming.

Schedules consist of stages: a stage recomputes ops in program order, each at most once, and then evaluates one op for
the first time. As in Checkmate (Jain et al., 2020, section 4), with three changes: the live bytes inside a stage are
exact; only the backward has stages unless the forward needs them to fit; and "closure cuts" demand that values read
later are either held when a stage begins or recomputed after it, without which the relaxation proves little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import arrays_of, remove_dead, to_schedule
from memopt.solver.problem import RematProblem, Schedule
from memopt.solver.simulator import simulate
from memopt.solver.stage_model import StageModel


@dataclass(frozen=True)
class _ExactResult:
    """The outcome of `solve_exactly`."""

    schedule: Schedule | None
    """The schedule, which fits the budget; None if none was found."""
    added_seconds: float
    """Seconds that the schedule adds; infinite without a schedule."""
    bound_seconds: float
    """A lower bound on the seconds that any schedule of stages adds."""
    proven: bool
    """True if the search was completed: the schedule is optimal within the gap, or none exists."""


def solve_exactly(
    problem: RematProblem,
    budget_bytes: int,
    *,
    seconds: float = 60.0,
    gap_seconds: float | None = None,
    below_seconds: float | None = None,
    nodes: int | None = None,
    variables: int | None = None,
) -> _ExactResult:
    """The fastest schedule of stages with a peak of at most `budget_bytes`, found within `seconds` of wall time.

    `nodes` also limits the search tree, for a result that is the same in every run; problems whose program has more
    than `variables` are left unsolved. The search ends early when the best schedule is within `gap_seconds` of the
    bound (default: 1e-4 of the step). Schedules that add more than `below_seconds` are excluded.
    """
    if problem.forward_ops == len(problem.ops):
        fits = simulate(problem, Schedule.save_all(problem)).peak_bytes <= budget_bytes
        return _ExactResult(Schedule.save_all(problem), 0.0, 0.0, True) if fits else _nothing
    staged = StageModel(problem, budget_bytes)
    if staged.impossible:
        return _nothing
    if variables is not None and staged.model.variables > variables:
        return _ExactResult(None, float("inf"), 0.0, False)
    unit = problem.seconds or 1.0
    gap = _GAP if gap_seconds is None else gap_seconds / unit  # of the cost, which is at most about 1: a step's seconds
    if below_seconds is not None:
        staged.model.cost_at_most(below_seconds / unit)
    values, bound, complete = staged.model.solve(seconds, gap, nodes)
    if values is None:
        return _ExactResult(None, float("inf"), bound * unit, complete)
    schedule = to_schedule(remove_dead(arrays_of(problem), np.array(staged.evaluations(values), np.int64)))
    simulation = simulate(problem, schedule)
    if simulation.peak_bytes > budget_bytes:  # a second version of a kept storage outlived its making
        return _ExactResult(None, float("inf"), bound * unit, False)
    return _ExactResult(schedule, simulation.added_seconds, bound * unit, complete)


_GAP = 1e-4
_nothing = _ExactResult(None, float("inf"), float("inf"), True)


@dataclass(frozen=True)
class Exact:
    """Proposes the exact solver's schedule for problems of at most `most_forward_ops` forward ops, else nothing.

    `nodes` limits the search tree and `variables` the program, so that the schedule is the same in every run and takes
    less than a second. `gap` is the share of the step's seconds by which it may be above the optimum.
    """

    name: str = "exact"
    most_forward_ops: int = 24
    nodes: int = 300
    variables: int = 600
    gap: float = _GAP

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        if problem.forward_ops > self.most_forward_ops:
            return []
        found = solve_exactly(
            problem,
            budget_bytes,
            gap_seconds=self.gap * problem.seconds,
            nodes=self.nodes,
            variables=self.variables,
        ).schedule
        return [] if found is None else [found]

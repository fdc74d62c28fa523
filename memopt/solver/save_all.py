"""What stands in for the portfolio where nothing may be evaluated again."""

from __future__ import annotations

from collections.abc import Callable

from memopt.solver.best_effort import Progress
from memopt.solver.errors import Infeasible
from memopt.solver.portfolio import Baseline, Effort, Solution
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate


class SaveAll:
    """The one schedule that evaluates each op once and keeps everything, if it fits."""

    def __init__(self, problem: RematProblem) -> None:
        schedule = Schedule.save_all(problem)
        simulation = simulate(problem, schedule)
        self._solution = Solution(schedule, simulation.peak_bytes, 0.0, 0.0, "save all")
        self._op = schedule.evaluations[simulation.peak_position]

    def solve(
        self,
        budget_bytes: int,
        effort: Effort = "default",
        *,
        limit_seconds: float = 60.0,
        report: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """The schedule. Raises `Infeasible` where it does not fit."""
        if self._solution.peak_bytes > budget_bytes:
            raise Infeasible(self._solution.peak_bytes, self._solution.peak_bytes, self._op)
        return self._solution

    def smallest(self) -> Solution:
        """The schedule, whose peak is the smallest budget that works."""
        return self._solution

    def baselines(self) -> tuple[Baseline, ...]:
        """The schedule itself: recipes of checkpointing evaluate again."""
        return (Baseline("save all", self._solution.peak_bytes, 0.0),)

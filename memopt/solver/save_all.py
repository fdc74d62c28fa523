"""A replacement for the portfolio when nothing may be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memopt.solver.best_effort import Progress
from memopt.solver.portfolio import Baseline, Effort, Solution
from memopt.solver.problem import RematProblem
from memopt.solver.protocol import Infeasible, Solver, UserSolvers
from memopt.solver.schedule import Schedule
from memopt.solver.simulator import simulate


class SaveAll:
    """Has the methods of `Portfolio`, but its only schedule evaluates each op once and saves everything.

    `solvers` are a user's own, which `OffloadPortfolio` asks; without offloads there is nothing for them to choose.
    """

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver] = ()) -> None:
        self.users = UserSolvers(problem, solvers)
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
        """The schedule that saves everything. Raises `Infeasible` if its peak is above `budget_bytes`."""
        if self._solution.peak_bytes > budget_bytes:
            raise Infeasible(self._solution.peak_bytes, self._solution.peak_bytes, self._op)
        return self._solution

    def smallest(self) -> Solution:
        """The schedule that saves everything; its peak is the smallest budget that works."""
        return self._solution

    def baselines(self) -> tuple[Baseline, ...]:
        """The cost of saving everything; the other recipes of checkpointing would recompute."""
        return (Baseline("save all", self._solution.peak_bytes, 0.0),)

"""The solvers that a user gives: asked once for each budget, and judged by the simulator alone."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.solver.problem import RematProblem
from memopt.solver.protocol import Solver, checked_solvers, proposed
from memopt.solver.schedule import Schedule


class UserSolvers:
    """The users' solvers for one problem. Raises `SolverError` for what is not a solver."""

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver]) -> None:
        self.solvers = checked_solvers(solvers)
        self._problem = problem
        self._last: tuple[int, list[tuple[str, Schedule]]] | None = None

    def at(self, budget_bytes: int) -> list[tuple[str, Schedule]]:
        """(solver's name, schedule) for everything that they propose at a budget, in their order.

        The last budget's proposals are kept. Raises `SolverError` where a solver raises or proposes nonsense.
        """
        if self._last is None or self._last[0] != budget_bytes:
            pairs = [(s.name, plan) for s in self.solvers for plan in proposed(s, self._problem, budget_bytes)]
            self._last = (budget_bytes, pairs)
        return self._last[1]

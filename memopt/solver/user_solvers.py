"""A user's solvers, which are called once for each budget and whose schedules are checked."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.solver.problem import RematProblem
from memopt.solver.protocol import Solver, checked_solvers, proposed
from memopt.solver.schedule import Schedule


class UserSolvers:
    """A user's solvers for one problem. Raises `SolverError` if one does not follow the protocol."""

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver]) -> None:
        self.solvers = checked_solvers(solvers)
        self._problem = problem
        self._last: tuple[int, list[tuple[str, Schedule]]] | None = None

    def at(self, budget_bytes: int) -> list[tuple[str, Schedule]]:
        """All proposals at a budget, as pairs (solver's name, schedule), in the order of the solvers.

        The last budget's proposals are cached. Raises `SolverError` if a solver raises or proposes anything but valid
        schedules.
        """
        if self._last is None or self._last[0] != budget_bytes:
            pairs = [(s.name, plan) for s in self.solvers for plan in proposed(s, self._problem, budget_bytes)]
            self._last = (budget_bytes, pairs)
        return self._last[1]

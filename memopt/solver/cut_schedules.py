"""The minimum cut as a solver: one schedule for each vertex of the hull of saved bytes and recomputed seconds."""

from __future__ import annotations

from memopt.solver.hull import lower_hull
from memopt.solver.just_in_time import just_in_time
from memopt.solver.min_cut import CutNetwork
from memopt.solver.per_problem import PerProblem
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule


class MinimumCut:
    """Proposes the just-in-time schedules of the cuts on the lower hull, by rising saved bytes.

    They are the same at every budget; the portfolio takes those that fit and repairs the next larger ones.
    """

    name = "minimum cut"

    def __init__(self) -> None:
        self._schedules = PerProblem(_schedules)

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        return self._schedules(problem)


def _schedules(problem: RematProblem) -> list[Schedule]:
    """The just-in-time schedules of the problem's lower hull."""
    return [just_in_time(problem, cut.saved) for cut in lower_hull(CutNetwork(problem))]

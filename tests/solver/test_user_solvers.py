from collections.abc import Iterator

import pytest

from memopt.solver.errors import SolverError
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.user_solvers import UserSolvers
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step


class Counting:
    """Proposes the given orders and lists the budgets at which it is asked."""

    def __init__(self, name: str, *orders: tuple[int, ...]) -> None:
        self.name = name
        self.orders = orders
        self.asked: list[int] = []

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
        self.asked.append(budget_bytes)
        return map(Schedule, self.orders)


def test_proposals_come_in_the_solvers_order_with_their_names() -> None:
    users = UserSolvers(small_step(), [Counting("one", RECOMPUTED, SAVE_ALL), Counting("two", SAVE_ALL)])
    proposals = [("one", Schedule(RECOMPUTED)), ("one", Schedule(SAVE_ALL)), ("two", Schedule(SAVE_ALL))]
    assert users.at(110) == proposals


def test_solvers_are_asked_again_only_at_another_budget() -> None:
    solver = Counting("one", SAVE_ALL)
    users = UserSolvers(small_step(), [solver])
    for budget_bytes in (110, 110, 112, 110):
        users.at(budget_bytes)
    assert solver.asked == [110, 112, 110]


def test_an_invalid_proposal_and_a_class_are_refused() -> None:
    with pytest.raises(SolverError, match="solver 'one' proposed an invalid schedule"):
        UserSolvers(small_step(), [Counting("one", (0, 1))]).at(110)
    with pytest.raises(SolverError, match="Counting is a class"):
        UserSolvers(small_step(), [Counting])  # type: ignore[list-item]

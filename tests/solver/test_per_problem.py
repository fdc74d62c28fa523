"""A value for each problem, kept until another is asked for."""

from __future__ import annotations

from examples.models.problems import chain
from memopt.solver.per_problem import PerProblem
from memopt.solver.problem import RematProblem


def test_it_is_made_once_until_another_problem_comes() -> None:
    made: list[RematProblem] = []

    def ops(problem: RematProblem) -> int:
        made.append(problem)
        return len(problem.ops)

    kept = PerProblem(ops)
    one, other = chain(3), chain(4)
    assert [kept(one), kept(one), kept(other), kept(one)] == [6, 6, 8, 6]
    assert made == [one, other, one]

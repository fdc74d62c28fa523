from dataclasses import replace

import pytest

from memopt.solver.problem import Schedule
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step


def test_recomputations_are_counted_by_op_and_in_seconds() -> None:
    schedule = Schedule((0, 1, 2, 0, 1, 3, 0, 4))
    schedule.check(small_step())
    assert schedule.recomputed() == {0: 2, 1: 1}
    assert schedule.added_seconds(small_step()) == 4.0
    assert Schedule.save_all(small_step()) == Schedule(SAVE_ALL)
    assert Schedule.save_all(small_step()).recomputed() == {}


@pytest.mark.parametrize(
    ("evaluations", "message"),
    [
        ((0, 1, 2, 3, 4, 3), "evaluation 5 recomputes d, which must not be recomputed"),
        ((0, 2, 1, 3, 4), "evaluation 1 is c, although op 1 comes before it"),
        ((0, 1, 2, 3), "evaluates 4 of the problem's 5 ops; the first that is missing is"),
    ],
)
def test_invalid_orders_are_named(evaluations: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(evaluations).check(small_step())


def test_an_op_that_is_not_recomputable_must_run_once() -> None:
    problem = small_step()
    problem = replace(problem, ops=(replace(problem.ops[0], recomputable=False), *problem.ops[1:]))
    with pytest.raises(ValueError, match="evaluation 4 recomputes a"):
        Schedule(RECOMPUTED).check(problem)

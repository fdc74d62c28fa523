import pytest

from examples.models.exact import StageModel
from tests.solver.small import RECOMPUTED, SAVE_ALL, small_step


@pytest.mark.parametrize(("budget_bytes", "best"), [(112, SAVE_ALL), (111, RECOMPUTED), (110, RECOMPUTED)])
def test_the_least_recomputation_within_a_budget(budget_bytes: int, best: tuple[int, ...]) -> None:
    staged = StageModel(small_step(), budget_bytes)
    values, _, complete = staged.model.solve(10.0, 1e-6)
    assert values is not None
    assert complete
    assert tuple(staged.evaluations(values)) == best


def test_a_budget_below_the_floor_has_no_schedule() -> None:
    staged = StageModel(small_step(), 109)
    values, _, complete = staged.model.solve(10.0, 1e-6)
    assert (values, complete, staged.impossible) == (None, True, False)
    assert StageModel(small_step(), 105).impossible  # e holds d's 5 bytes and its own, beside the 100 resident ones
    assert not StageModel(small_step(), 106).impossible

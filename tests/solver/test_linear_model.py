import pytest

from examples.models.exact import _LinearModel


def test_the_cheaper_of_two_variables_covers_a_demand() -> None:
    model = _LinearModel()
    cheap, dear = model.variable(1.0, integral=True), model.variable(2.0, integral=True)
    model.at_most([(cheap, -1.0), (dear, -1.0)], -1.0)
    values, bound, complete = model.solve(10.0, 0.0)
    assert values is not None
    assert values.tolist() == [1.0, 0.0]
    assert (bound, complete, model.variables) == (1.0, True, 2)


def test_a_variable_is_within_the_sum_of_others_and_at_least_its_lowest() -> None:
    model = _LinearModel()
    first, second = model.variable(1.0), model.variable(3.0)
    bounded = model.variable(lowest=0.5)
    model.within(bounded, [first, second])
    values, _, complete = model.solve(10.0, 0.0)
    assert values is not None
    assert values.tolist() == pytest.approx([0.5, 0.0, 0.5])
    assert complete


def test_a_contradiction_has_no_values() -> None:
    model = _LinearModel()
    model.variable(2.0, lowest=1.0)
    model.cost_at_most(1.0)
    assert model.solve(10.0, 0.0) == (None, float("inf"), True)


def test_a_model_without_variables_is_solved_at_once() -> None:
    model = _LinearModel()
    assert model.solve(10.0, 0.0)[1:] == (0.0, True)
    model.at_most([], -1.0)
    assert model.solve(10.0, 0.0) == (None, float("inf"), True)

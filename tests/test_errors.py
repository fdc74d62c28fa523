from __future__ import annotations

import pytest

from memopt.errors import GIB, BudgetError, round_up, would_do


@pytest.mark.parametrize(
    ("gb", "text"), [(1.0, "1"), (0.1234561, "0.123457"), (12.0000001, "12.0001"), (2**-17, "0.0000076294")]
)
def test_rounding_up_never_gives_too_little(gb: float, text: str) -> None:
    assert round_up(gb) == text
    assert float(text) >= gb


def test_the_message_names_both_budgets_and_what_would_help() -> None:
    error = BudgetError(GIB, 3 * GIB // 2, "activations (1.2 GB)", further=["a batch of 4 fits", "fp8 would help"])
    assert str(error) == (
        "a budget of 1 GB is too small for this step: the smallest that works is 1.5 GB, dominated by activations "
        "(1.2 GB); a batch of 4 fits; fp8 would help"
    )
    assert (error.budget_gb, error.smallest_gb, error.dominated_by) == (1.0, 1.5, "activations (1.2 GB)")
    assert error.proposals == ()
    assert error.smallest_with == {}


def test_a_budget_that_works_but_may_not_be_the_smallest() -> None:
    error = BudgetError(GIB, 2 * GIB, "the parameters", least=False)
    assert str(error) == "a budget of 1 GB is too small for this step: 2 GB leaves room for the parameters"


def test_a_change_that_helps_names_no_budget_below_the_one_given() -> None:
    assert would_do(899, 1000) == "this budget would do, with 10.1% to spare"
    assert would_do(1000, 1000) == "this budget would do, with 0.0% to spare"

"""Several forwards that wait together share the budget: each saves as much as leaves room for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from memopt.errors import BudgetError
from memopt.planning.derived import among_equals

BUDGET, PASSING, LEAST = 10_000, 500, 800


@dataclass
class Account:
    elsewhere: int = 0


@dataclass
class SavesAllThatFits:
    """A plan that holds what others leave, as the fastest plan does, and recomputes the rest."""

    held_bytes: int
    added_time: float
    account: Account


def planner(wanted: int, budget: int = BUDGET) -> Any:
    def beside(others: int) -> SavesAllThatFits:
        if budget - others < LEAST:
            raise BudgetError(budget, others + LEAST, "activations")
        held = min(wanted, budget - others - PASSING)
        return SavesAllThatFits(held, 1 - held / wanted, Account())

    return beside


@pytest.mark.parametrize("others", [1, 3, 7])
def test_the_room_is_used(others: int) -> None:
    found = among_equals(planner(4_000), others, BUDGET)
    best = min(4_000, (BUDGET - PASSING) // (others + 1))
    assert 0.9 * best <= found.held_bytes <= best


def test_what_fits_whole_is_saved_whole() -> None:
    assert among_equals(planner(1_000), 3, BUDGET).held_bytes == 1_000


@pytest.mark.parametrize("budget", [1, LEAST - 1, LEAST, LEAST + 200])
def test_the_budget_that_a_refusal_names_works(budget: int) -> None:
    with pytest.raises(BudgetError, match="4 forwards of this model") as refused:
        among_equals(planner(4_000, budget), 3, budget)
    named = refused.value.smallest_bytes
    assert among_equals(planner(4_000, named), 3, named).held_bytes * 4 + PASSING <= named

"""Several forwards that wait together share the budget: each saves as much as leaves room for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from memopt.errors import BudgetError
from memopt.planning.among_equals import among_equals

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


def planner(wanted: int) -> Any:
    def beside(others: int) -> SavesAllThatFits:
        if BUDGET - others < LEAST:
            raise BudgetError(BUDGET, others + LEAST, "activations")
        held = min(wanted, BUDGET - others - PASSING)
        return SavesAllThatFits(held, 1 - held / wanted, Account())

    return beside


@pytest.mark.parametrize("others", [1, 3, 7])
def test_the_room_is_used(others: int) -> None:
    found = among_equals(planner(4_000), others, BUDGET)
    best = min(4_000, (BUDGET - PASSING) // (others + 1))
    assert 0.9 * best <= found.held_bytes <= best


def test_what_fits_whole_is_saved_whole() -> None:
    assert among_equals(planner(1_000), 3, BUDGET).held_bytes == 1_000

"""What other code takes between a forward and its backward is a moment of the step, for which a plan leaves room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.account.account import MEANWHILE
from memopt.errors import BudgetError
from tests.planned import ACCOUNT, captured, make_plan, region


def test_a_forward_holds_so_little_that_other_code_has_room_until_the_backward() -> None:
    step = captured(region(4))
    alone = make_plan(step, ACCOUNT, 10**7)
    budget, meanwhile = alone.predicted_peak_bytes, alone.predicted_peak_bytes // 3
    beside = make_plan(step, replace(ACCOUNT, meanwhile=meanwhile), budget)
    assert beside.held_bytes < alone.held_bytes
    assert ACCOUNT.resident_bytes + beside.held_bytes + meanwhile <= budget


def test_it_is_a_row_where_it_decides_and_the_smallest_budget_has_it() -> None:
    step, account = captured(region(2)), replace(ACCOUNT, meanwhile=10**6)
    with pytest.raises(BudgetError, match="until the backward 977 kB") as refused:
        make_plan(step, account, 1)
    plan = make_plan(step, account, refused.value.smallest_bytes)
    assert dict(plan.planned.rows)[MEANWHILE] == 10**6
    assert plan.predicted_peak_bytes == refused.value.smallest_bytes

"""Rounds of planning and lowering: tighter, looser, and when to stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import memopt
from memopt.planning.footprint import Footprint
from memopt.planning.make_plan import make_plan
from memopt.planning.refit import Refit, as_lowered
from tests.planned import ACCOUNT, captured

PLAN = make_plan(captured(), replace(ACCOUNT, optimizer_state=0, optimizer_temporaries=0), 2**40)
BUDGET = 100_000


def plan(peak: int, added: float = 0.0, mark: str = "") -> memopt.Plan:
    regions: Any = (mark or str(peak),)
    return replace(PLAN, ceiling_bytes=peak, step_seconds=1.0, added_seconds=added, regions=regions)


def test_the_peak_becomes_that_of_the_lowered_graphs() -> None:
    lowered = as_lowered(PLAN, Footprint(40_000, 30_000, 60_000, 10_000))
    fixed = PLAN.account.resident_bytes
    assert lowered.predicted_peak_bytes == lowered.ceiling_bytes == fixed + 60_000
    assert sum(nbytes for _, nbytes in lowered.planned.rows) == lowered.predicted_peak_bytes
    assert lowered.held_bytes == 30_000
    assert as_lowered(lowered, Footprint(70_000, 30_000, 60_000, 10_000)).ceiling_bytes == fixed + 70_000


def test_above_the_budget_the_next_plan_reckons_with_what_was_too_much() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert refit.judge(plan(110_000), "first")
    assert refit.lowering_bytes == 10_000
    assert not refit.judge(plan(99_000, 0.2), "second")
    assert refit.best()[1] == "second"


def test_room_is_used_where_the_plan_recomputes() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert not Refit(BUDGET).judge(plan(80_000), "nothing to gain")
    assert refit.judge(plan(80_000, 0.2), "first")
    assert refit.lowering_bytes == -20_000
    assert refit.judge(plan(101_000, 0.1), "too loose")
    assert not refit.judge(plan(99_500, 0.15), "third")
    assert refit.best()[1] == "third"


def test_where_nothing_fits_the_refusal_has_the_figure() -> None:
    refit: Refit[str] = Refit(BUDGET)
    for peak in (120_000, 110_000):
        refit.judge(plan(peak), "above")
    with pytest.raises(memopt.BudgetError, match="what lowering makes of 2 plans") as refused:
        refit.best()
    assert refused.value.smallest_bytes == 110_000

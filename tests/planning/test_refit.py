"""Rounds of planning and compiling: fewer bytes, more bytes, and the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import memopt
from memopt.planning.refit import Footprint, Refit, as_compiled
from tests.planned import ACCOUNT, captured, make_plan, two_regions

PLAN = make_plan(captured(), replace(ACCOUNT, optimizer_state=0, optimizer_temporaries=0), 2**40)
BUDGET = 100_000


def plan(peak: int, added: float = 0.0, mark: str = "") -> memopt.Plan:
    regions: Any = (mark or str(peak),)
    return replace(PLAN, ceiling_bytes=peak, step_seconds=1.0, added_seconds=added, regions=regions)


def test_the_peak_becomes_that_of_the_compiled_graphs() -> None:
    compiled = as_compiled(PLAN, [Footprint(40_000, 30_000, 60_000, 10_000)])
    fixed = PLAN.account.resident_bytes
    assert compiled.predicted_peak_bytes == compiled.ceiling_bytes == fixed + 60_000
    assert sum(nbytes for _, nbytes in compiled.planned.rows) == compiled.predicted_peak_bytes
    assert compiled.held_bytes == 30_000
    assert as_compiled(compiled, [Footprint(70_000, 30_000, 60_000, 10_000)]).ceiling_bytes == fixed + 70_000


HUGE = 10**9
"""More bytes than a step of `two_regions` holds."""


def of_two_regions(first: Footprint | None, second: Footprint | None) -> memopt.Plan:
    found = make_plan(two_regions(), replace(ACCOUNT, optimizer_state=0, optimizer_temporaries=0), 2**40)
    return as_compiled(found, [first, second])


def test_regions_that_are_not_compiled_hold_what_is_planned() -> None:
    plain = of_two_regions(None, None)
    assert plain.account.lowering == 0


def test_the_second_forward_lies_beside_what_the_code_of_the_first_leaves() -> None:
    def peak(left: int) -> int:
        second = Footprint(HUGE, 0, 0, 0)
        return of_two_regions(Footprint(0, left, 0, 0), second).ceiling_bytes

    assert peak(70_000) - peak(20_000) == 50_000


def test_the_first_backward_lies_beside_nothing_that_the_second_forward_left() -> None:
    def peak(of_first: int, of_second: int) -> int:
        first, second = Footprint(0, of_first, HUGE, 0), Footprint(0, of_second, 0, 0)
        return of_two_regions(first, second).ceiling_bytes

    assert peak(70_000, 90_000) == peak(20_000, 10_000)


def test_the_second_backward_lies_beside_what_the_first_forward_left() -> None:
    def peak(of_first: int, of_second: int) -> int:
        first, second = Footprint(0, of_first, 0, 0), Footprint(0, of_second, HUGE, 0)
        return of_two_regions(first, second).ceiling_bytes

    assert peak(70_000, 90_000) - peak(20_000, 10_000) == 50_000


def judged(refit: Refit[str], compiled: memopt.Plan, made: str, planned: int = BUDGET) -> bool:
    """Whether another round is worthwhile after this one, whose plan had `planned` bytes."""
    bare = replace(plan(planned), account=replace(compiled.account, lowering=0))
    refit.judge(bare, compiled, made)
    return refit.again


def test_above_the_budget_the_next_plan_gets_less() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert judged(refit, plan(110_000), "first")
    assert refit.lowering_bytes == 10_000
    assert not judged(refit, plan(99_000, 0.2), "second")
    assert refit.best()[1] == "second"


def test_a_plan_below_the_budget_leaves_for_compilation_what_its_code_adds() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert judged(refit, plan(101_000), "first", planned=98_000)
    assert refit.lowering_bytes == 3_000, "with 1,000, the same plan would be found again"


def test_misses_in_a_row_leave_twice_as_much_each_time() -> None:
    refit: Refit[str] = Refit(BUDGET)
    judged(refit, plan(110_000), "first")
    judged(refit, plan(101_000), "second", planned=90_000)
    assert refit.lowering_bytes == 11_000 + 1_000
    judged(refit, plan(101_000), "third", planned=88_000)
    assert refit.lowering_bytes == 13_000 + 3 * 1_000


def test_room_is_used_where_the_plan_recomputes() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert not judged(Refit(BUDGET), plan(80_000), "nothing to gain")
    assert judged(refit, plan(80_000, 0.2), "first")
    assert refit.lowering_bytes == -20_000
    assert judged(refit, plan(101_000, 0.1), "too loose", planned=119_000)
    assert refit.lowering_bytes == -18_000
    assert not judged(refit, plan(99_500, 0.15), "third", planned=109_000)
    assert refit.best()[1] == "third"


def test_between_the_smallest_plan_and_one_that_does_not_fit_the_middle_is_tried() -> None:
    refit: Refit[str] = Refit(BUDGET)
    judged(refit, plan(103_000, 0.1), "too large")
    assert refit.take_smallest(60_000)
    assert judged(refit, plan(62_000, 0.3), "smallest", planned=60_000)
    assert refit.lowering_bytes == 2_000
    assert judged(refit, plan(101_000, 0.15), "middle", planned=98_000)
    assert refit.lowering_bytes == 4_000, "what the latest code adds, and its excess"
    assert not judged(refit, plan(97_000, 0.2), "between", planned=94_000)
    assert refit.best()[1] == "between"


def test_where_nothing_fits_the_refusal_has_the_smallest_peak() -> None:
    refit: Refit[str] = Refit(BUDGET)
    for peak in (120_000, 110_000):
        judged(refit, plan(peak), "above")
    with pytest.raises(
        memopt.BudgetError, match="compiled code, which held more than the budget in all 2 plans"
    ) as refused:
        refit.best()
    assert refused.value.smallest_bytes == 110_000


def test_the_smallest_plan_is_taken_only_within_the_budget() -> None:
    refit: Refit[str] = Refit(BUDGET)
    assert not refit.take_smallest(BUDGET + 1)
    judged(refit, plan(110_000), "above")
    assert refit.take_smallest(90_000)
    assert refit.lowering_bytes == 10_000
    judged(refit, plan(120_000), "smallest")
    with pytest.raises(memopt.BudgetError) as refused:
        refit.best()
    assert refused.value.smallest_bytes == 120_000

"""What is left of a budget for the steps of other models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.errors import GIB, BudgetError
from memopt.planning import derived
from memopt.planning.derived import StepBytes, least_plan, leaving_free, leaving_room
from memopt.planning.plan import Plan
from tests.planned import ACCOUNT, captured, make_plan, region

ROOMY = 10**9


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(captured(region(6)), ACCOUNT, ROOMY)


def test_the_plan_that_holds_least_has_the_smallest_peak(plan: Plan) -> None:
    least = least_plan(plan)
    assert least.budget_bytes == ROOMY
    assert least.held_bytes <= plan.held_bytes
    assert least.ceiling_bytes <= plan.smallest_bytes() * 1.5
    assert least.account == replace(plan.account, meanwhile=0)


def test_a_plan_with_much_room_beside_it_stays(plan: Plan) -> None:
    assert leaving_room(plan) is plan
    tight = replace(plan, budget_bytes=plan.ceiling_bytes)
    assert leaving_room(tight).held_bytes == least_plan(plan).held_bytes


def test_the_plan_that_leaves_room_is_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that holds least may lie further above the smallest peak than the budget: the step was refused in its
    backward."""
    roomy = make_plan(captured(region(6)), ACCOUNT, ROOMY)
    monkeypatch.setattr(derived, "_SLACK", (2, 0))  # as where there is none at a smaller peak
    smallest = roomy.smallest_bytes()
    for budget in (smallest, smallest + smallest // 16):
        assert leaving_room(roomy.at(budget / GIB)).ceiling_bytes <= budget


def test_needs_are_between_the_least_and_all(plan: Plan) -> None:
    needs = StepBytes.of(plan)
    assert needs.least_held <= needs.held
    assert needs.least_peak <= needs.peak
    assert needs.lasting + needs.peak == plan.plain.peak_bytes
    assert needs.with_callers_code(10**9).least_peak == needs.least_held + 10**9


def test_as_much_is_spared_as_there_is_room_for(plan: Plan) -> None:
    asked: list[int] = []

    def make(nbytes: int, staying: int) -> Plan:
        asked.append(nbytes)
        return make_plan(captured(region(6)), replace(ACCOUNT, meanwhile=nbytes), plan.ceiling_bytes)

    found = leaving_free(make, ROOMY)
    assert asked[0] == ROOMY
    assert 0 < asked[1] < ROOMY
    assert found.account.meanwhile == 0
    assert found.ceiling_bytes <= plan.ceiling_bytes
    assert found.held_bytes + found.account.resident_bytes + asked[1] <= plan.ceiling_bytes
    with pytest.raises(BudgetError):
        leaving_free(
            lambda nbytes, staying: make_plan(captured(region(6)), replace(ACCOUNT, meanwhile=nbytes), 1), ROOMY
        )


def test_a_refusal_with_nothing_to_leave_free_is_searched_once() -> None:
    asked: list[int] = []

    def make(nbytes: int, staying: int) -> Plan:
        asked.append(nbytes)
        return make_plan(captured(region(6)), ACCOUNT, 1)

    with pytest.raises(BudgetError):
        leaving_free(make, 0)
    assert asked == [0]

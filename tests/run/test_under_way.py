from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memopt.planning.make_plan import make_plan
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.run.under_way import UnderWay
from tests.planned import ACCOUNT, captured, region


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(captured(region(2)), ACCOUNT, 10**6)


def under_way(waiting_bytes: int, begun: list[Any]) -> UnderWay:
    return UnderWay(((), {}), Situation(), waiting_bytes, lambda *given: begun.append(given))  # type: ignore[arg-type, return-value]


def test_a_plan_is_too_tight_where_forwards_in_waiting_do_not_fit_beside_it(plan: Plan) -> None:
    room = plan.budget_bytes - plan.ceiling_bytes
    assert not under_way(room, []).is_too_tight(plan)
    assert under_way(room + 1, []).is_too_tight(plan)


def test_forwards_that_the_plan_counts_already_are_not_counted_twice(plan: Plan) -> None:
    account = replace(plan.account, other_forwards=1000)
    counted = replace(plan, account=account, budget_bytes=plan.ceiling_bytes)
    assert not under_way(1000, []).is_too_tight(counted)
    assert under_way(1001, []).is_too_tight(counted)


def test_the_crowded_situation_holds_what_waits(plan: Plan) -> None:
    begun: list[Any] = []
    call = under_way(123, begun)
    assert call.crowded == Situation(other_forwards=123)
    call.begin(plan)
    assert begun == [(plan, Situation())]

"""The plan with the shortest step among several variants of one step, that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.account.account import Account
from memopt.capture.operators import NOTHING
from memopt.errors import BudgetError
from memopt.planning.captured import Captured
from memopt.planning.make_plan import make_plan
from memopt.planning.options import DEFAULT_EFFORT
from memopt.planning.plan import Plan
from memopt.planning.plan_search import PlanSearch
from memopt.planning.receipt import plain_row
from memopt.rewrite import Rung
from tests.planned import ACCOUNT, captured, region

PLAIN, LEAN = captured(region(4)), captured(region(4, batch=32))
"""A step, and one that stands for the same with a lever pulled: half of the activations, half of the time."""
GROUND, FIRST, SECOND = (Rung(("one", "two")[:number], NOTHING) for number in range(3))


def needs(step: Captured) -> tuple[int, int]:
    """The smallest budget, and the one without recomputation."""
    plan = make_plan(step, ACCOUNT, 2**30)
    return plan.smallest_bytes(), plan.plain.peak_bytes


def climb(budget_bytes: int, *steps: tuple[Rung, Captured]) -> tuple[PlanSearch, Plan | None]:
    climb = PlanSearch(budget_bytes, DEFAULT_EFFORT)
    taken = None
    for rung, step in steps:
        taken = climb.weigh(rung, step, ACCOUNT)
    return climb, taken


def test_a_plan_without_recomputation_is_taken_at_once() -> None:
    _, taken = climb(needs(PLAIN)[1], (GROUND, PLAIN))
    assert taken is not None
    assert (taken.levers, taken.added_time) == ((), 0.0)
    assert taken.receipt == (plain_row("", PLAIN, ACCOUNT),)


def test_others_are_tried_before_anything_is_recomputed() -> None:
    least, plain = needs(PLAIN)
    _, taken = climb((least + plain) // 2, (GROUND, PLAIN))
    assert taken is None
    assert needs(LEAN)[1] <= (least + plain) // 2
    _, taken = climb((least + plain) // 2, (GROUND, PLAIN), (FIRST, LEAN))
    assert taken is not None
    assert taken.levers == ("one",)
    assert [row.lever for row in taken.receipt] == ["", "one"]


def test_the_shortest_step_wins() -> None:
    budget = needs(LEAN)[0]
    climbed, taken = climb(budget, (GROUND, PLAIN), (FIRST, LEAN), (SECOND, PLAIN))
    assert taken is None
    plan, rung = climbed.best()
    assert rung == FIRST
    assert (plan.levers, plan.receipt[-1].lever) == (("one",), "recompute")
    assert plan.receipt[-1].peak_bytes == plan.predicted_peak_bytes <= budget


def test_a_lever_that_only_costs_is_not_pulled() -> None:
    budget = sum(needs(LEAN)) // 2
    plan, rung = climb(budget, (GROUND, LEAN), (FIRST, PLAIN))[0].best()
    assert (rung, plan.levers) == (GROUND, ())


def test_the_refusal_names_the_smallest_of_all() -> None:
    climbed, _ = climb(2**10, (GROUND, PLAIN), (FIRST, LEAN))
    climbed.skip(SECOND, ("two: nothing to do here",))
    with pytest.raises(BudgetError, match="two: nothing to do here") as error:
        climbed.best()
    assert error.value.smallest_bytes == needs(LEAN)[0] < needs(PLAIN)[0]
    climbed, _ = climb(error.value.smallest_bytes, (GROUND, PLAIN), (FIRST, LEAN))
    assert climbed.best()[0].levers == ("one",)


def test_what_was_left_alone_is_a_note_of_the_plan() -> None:
    least, plain = needs(PLAIN)
    climbed, _ = climb((least + plain) // 2, (GROUND, PLAIN))
    climbed.skip(SECOND, ("two: nothing to do here",))
    assert "two: nothing to do here" in climbed.best()[0].notes


def test_nothing_is_recomputed_where_that_is_not_allowed() -> None:
    fixed = replace(PLAIN, recompute=False)
    least, plain = needs(fixed)
    assert least == plain
    with pytest.raises(BudgetError):
        make_plan(fixed, ACCOUNT, plain - 1)


def test_the_account_is_the_step_s_own() -> None:
    held: Account = replace(ACCOUNT, other_forwards=2**20)
    climb = PlanSearch(2**30, DEFAULT_EFFORT)
    taken = climb.weigh(GROUND, PLAIN, held)
    assert taken is not None
    assert taken.account == held


def test_a_lever_without_work_is_not_among_those_pulled() -> None:
    climbed = PlanSearch(needs(LEAN)[0], DEFAULT_EFFORT)
    climbed.skip(FIRST, ("one: nothing to do here",))
    assert climbed.weigh(SECOND, LEAN, ACCOUNT) is None
    assert climbed.best()[0].levers == ("two",)


def test_a_rung_that_may_be_faster_is_tried_where_all_fits() -> None:
    ground = replace(GROUND, next_is_faster=True)
    climbed, taken = climb(2**30, (ground, PLAIN))
    assert taken is None
    taken = climbed.weigh(FIRST, LEAN, ACCOUNT)
    assert taken is not None
    assert (taken.levers, [row.lever for row in taken.receipt]) == (("one",), ["", "one"])


def test_a_rung_that_is_slower_after_all_is_not_taken() -> None:
    climbed, taken = climb(2**30, (replace(GROUND, next_is_faster=True), captured(region(2))), (FIRST, PLAIN))
    assert taken is None
    assert climbed.best()[0].levers == ()

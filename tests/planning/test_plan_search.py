"""The plan with the shortest step among made-up lever sets of one step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from memopt.account.account import Account
from memopt.capture.operators import Rewriting
from memopt.errors import BudgetError
from memopt.planning.figures import plain_row
from memopt.planning.options import DEFAULT_EFFORT
from memopt.planning.plan import Plan
from memopt.planning.plan_search import PlanSearch
from memopt.planning.priced_step import PricedStep
from memopt.planning.stages import Priced
from tests.planned import ACCOUNT, captured, make_plan, region, under_levers

PLAIN, LEAN = captured(region(4)), captured(region(4, batch=32))
"""A step, and one that stands for the same step with a lever applied: half of the activations and half of the time."""
NO_LEVERS, FIRST, SECOND = (Rewriting(levers=("one", "two")[:number]) for number in range(3))


def needs(step: PricedStep) -> tuple[int, int]:
    """The smallest budget of a step, and its peak without recomputation."""
    plan = make_plan(step, ACCOUNT, 2**30)
    return plan.smallest_bytes(), plan.plain.peak_bytes


def search(budget_bytes: int, *steps: tuple[Rewriting, PricedStep]) -> tuple[PlanSearch, Plan | None]:
    """A search over these lever sets, and the plan for the last of them that ends the search, if any."""
    found = PlanSearch(budget_bytes, DEFAULT_EFFORT)
    taken = None
    for levers, step in steps:
        taken = found.consider(under_levers(step, levers))
    return found, taken


def test_a_plan_without_recomputation_is_taken_at_once() -> None:
    _, taken = search(needs(PLAIN)[1], (NO_LEVERS, PLAIN))
    assert taken is not None
    assert (taken.levers, taken.added_time) == ((), 0.0)
    assert taken.receipt == (plain_row("", PLAIN.plain, ACCOUNT),)


def test_other_lever_sets_are_tried_before_anything_is_recomputed() -> None:
    least, plain = needs(PLAIN)
    _, taken = search((least + plain) // 2, (NO_LEVERS, PLAIN))
    assert taken is None
    assert needs(LEAN)[1] <= (least + plain) // 2
    _, taken = search((least + plain) // 2, (NO_LEVERS, PLAIN), (FIRST, LEAN))
    assert taken is not None
    assert taken.levers == ("one",)
    assert [row.lever for row in taken.receipt] == ["", "one"]


def test_a_step_that_cannot_end_the_search_is_solved_last(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, solved = Priced.solve, list[Rewriting]()

    def counted(self: Priced, *given: Any, **options: Any) -> Plan:
        solved.append(self.levers)
        return solve(self, *given, **options)

    monkeypatch.setattr(Priced, "solve", counted)
    budget = sum(needs(PLAIN)) // 2
    solved.clear()
    found, _ = search(budget, (NO_LEVERS, PLAIN))
    assert not solved
    assert found.best()[0].levers == ()
    assert solved[0] == NO_LEVERS
    solved.clear()
    search(budget, (NO_LEVERS, PLAIN), (FIRST, LEAN))
    assert solved == [FIRST]


def test_the_shortest_step_wins() -> None:
    budget = needs(LEAN)[0]
    found, taken = search(budget, (NO_LEVERS, PLAIN), (FIRST, LEAN), (SECOND, PLAIN))
    assert taken is None
    plan, levers = found.best()
    assert levers == FIRST
    assert (plan.levers, plan.receipt[-1].lever) == (("one",), "recompute")
    assert plan.receipt[-1].peak_bytes == plan.predicted_peak_bytes <= budget


def test_a_lever_that_only_costs_is_not_used() -> None:
    budget = sum(needs(LEAN)) // 2
    plan, levers = search(budget, (NO_LEVERS, LEAN), (FIRST, PLAIN))[0].best()
    assert (levers, plan.levers) == (NO_LEVERS, ())


def test_the_refusal_names_the_smallest_budget_of_all() -> None:
    found, _ = search(2**10, (NO_LEVERS, PLAIN), (FIRST, LEAN))
    found.skip(SECOND, ("two: nothing to do here",))
    with pytest.raises(BudgetError, match="two: nothing to do here") as error:
        found.best()
    assert error.value.smallest_bytes == needs(LEAN)[0] < needs(PLAIN)[0]
    found, _ = search(error.value.smallest_bytes, (NO_LEVERS, PLAIN), (FIRST, LEAN))
    assert found.best()[0].levers == ("one",)


def test_skipped_levers_are_noted_in_the_plan() -> None:
    least, plain = needs(PLAIN)
    found, _ = search((least + plain) // 2, (NO_LEVERS, PLAIN))
    found.skip(SECOND, ("two: nothing to do here",))
    assert "two: nothing to do here" in found.best()[0].notes


def test_nothing_is_recomputed_where_that_is_not_allowed() -> None:
    fixed = PLAIN.priced_for(recompute=False)
    least, plain = needs(fixed)
    assert least == plain
    with pytest.raises(BudgetError):
        make_plan(fixed, ACCOUNT, plain - 1)


def test_the_account_is_the_step_s_own() -> None:
    held: Account = replace(ACCOUNT, other_forwards=2**20)
    found = PlanSearch(2**30, DEFAULT_EFFORT)
    taken = found.consider(under_levers(PLAIN, NO_LEVERS, held))
    assert taken is not None
    assert taken.account == held


def test_a_lever_with_nothing_to_change_is_not_listed() -> None:
    found = PlanSearch(needs(LEAN)[0], DEFAULT_EFFORT)
    found.skip(FIRST, ("one: nothing to do here",))
    assert found.consider(under_levers(LEAN, SECOND)) is None
    assert found.best()[0].levers == ("two",)


def test_a_lever_set_that_may_be_faster_is_tried_where_all_fits() -> None:
    faster_next = replace(NO_LEVERS, next_is_faster=True)
    found, taken = search(2**30, (faster_next, PLAIN))
    assert taken is None
    taken = found.consider(under_levers(LEAN, FIRST))
    assert taken is not None
    assert (taken.levers, [row.lever for row in taken.receipt]) == (("one",), ["", "one"])


def test_a_lever_set_that_turns_out_slower_is_not_taken() -> None:
    found, taken = search(2**30, (replace(NO_LEVERS, next_is_faster=True), captured(region(2))), (FIRST, PLAIN))
    assert taken is None
    assert found.best()[0].levers == ()


def test_a_refusal_whose_figure_is_not_the_smallest_says_so() -> None:
    found, _ = search(2**10, (NO_LEVERS, PLAIN))
    found._refused.append(BudgetError(2**10, 2**11, "gaps", least=False))
    with pytest.raises(BudgetError, match="leaves room for gaps") as error:
        found.best()
    assert not error.value.least

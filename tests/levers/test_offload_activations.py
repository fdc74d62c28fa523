"""The link over which activations may be offloaded, and the plans that use it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.account.account import breakdown
from memopt.capture.operators import NOTHING, Rewriting
from memopt.device import hardware
from memopt.errors import BudgetError
from memopt.levers import DEFAULT_LEVERS
from memopt.levers.all import OFFLOAD_ACTIVATIONS, offload_link
from memopt.planning.derived import retained_peak
from memopt.planning.options import DEFAULT_EFFORT
from memopt.planning.plan import Plan
from memopt.planning.plan_search import PlanSearch
from memopt.planning.planner import smallest
from memopt.planning.priced_step import PricedStep
from memopt.planning.schedule_parts import held_after_forward, module_rows
from memopt.solver import Link, Schedule
from tests.planned import ACCOUNT, captured, make_plan, region, under_levers

FAST = Link(1e12, 1e-6, 2**30)
"""Moves what the steps below keep many times over while they run."""
SLOW = Link(1e6, 1e-6, 2**30)
GROUND, ONE = NOTHING, Rewriting(levers=("one",))
ROOMY = 2**30


def layers(batch: int) -> PricedStep:
    """Six layers on a card that moves values of any size."""
    return captured(region(6, width=64, batch=batch)).priced_for(
        hardware=replace(hardware("h100"), least_moved_bytes=0)
    )


def step(link: Link | None = FAST) -> PricedStep:
    return layers(256).priced_for(link=link)


def least(step: PricedStep) -> int:
    return smallest(step.problem, ACCOUNT)[0]


def plan_over(budget_bytes: int, *steps: tuple[Rewriting, PricedStep]) -> Plan:
    found = PlanSearch(budget_bytes, DEFAULT_EFFORT)
    for lever_set, step in steps:
        taken = found.consider(under_levers(step, lever_set))
        if taken is not None:
            return taken
    return found.best()[0]


@pytest.fixture(scope="module")
def tight() -> Plan:
    return plan_over(least(step(None)), (GROUND, step()))


def test_the_link_is_the_card_s_where_it_may_be_used() -> None:
    card = hardware("rtx-4090")
    assert OFFLOAD_ACTIVATIONS.name in DEFAULT_LEVERS
    assert offload_link(card, DEFAULT_LEVERS) == card.link
    assert offload_link(card, {"recompute"}) is None
    assert offload_link(hardware("cpu"), DEFAULT_LEVERS) is None


def test_lever_sets_of_the_same_levers_are_told_apart() -> None:
    """One of them is above the budget, with offloads too, and the other one fits with them alone."""
    larger = layers(1024).priced_for(link=FAST)
    budget = least(step())
    assert least(larger) > budget
    assert plan_over(budget, (GROUND, larger), (replace(GROUND), step())).moved_bytes > 0


def test_offload_is_tried_where_recomputation_adds_time(tight: Plan) -> None:
    alone = plan_over(tight.budget_bytes, (GROUND, step(None)))
    assert alone.moved_bytes == 0 < tight.moved_bytes
    assert tight.added_seconds < alone.added_seconds
    assert tight.levers == ("offload_activations",)
    assert tight.predicted_peak_bytes <= tight.budget_bytes
    roomy = plan_over(ROOMY, (GROUND, step()))
    assert (roomy.moved_bytes, roomy.levers) == (0, ())


def test_small_values_stay() -> None:
    """Those of the layers have 64 kB, and a card moves none below 1 MB unless told otherwise."""
    large = step().priced_for(hardware=hardware("h100"))
    assert plan_over(least(step(None)), (GROUND, large)).moved_bytes == 0


def test_over_a_slow_link_recomputation_is_faster() -> None:
    plan = plan_over(int(1.3 * least(step(None))), (GROUND, step(SLOW)))
    assert plan.added_time > 0
    assert (plan.moved_bytes, plan.levers) == (0, ())


def test_the_smallest_budget_counts_it() -> None:
    once = step().priced_for(recompute=False)
    assert least(once) < least(once.priced_for(link=None))
    with pytest.raises(BudgetError) as error:
        plan_over(2**10, (GROUND, once))
    assert error.value.smallest_bytes == least(once)
    assert plan_over(error.value.smallest_bytes, (GROUND, once)).predicted_peak_bytes == error.value.smallest_bytes
    with pytest.raises(BudgetError):
        plan_over(error.value.smallest_bytes - 1, (GROUND, once))


def test_room_on_the_host_is_not_exceeded() -> None:
    budget = least(step(None))
    free = plan_over(budget, (GROUND, step()))
    little = plan_over(budget, (GROUND, step(replace(FAST, host_bytes=free.host_bytes // 2))))
    assert little.host_bytes <= free.host_bytes // 2
    assert little.added_seconds > free.added_seconds


@pytest.mark.slow
def test_with_the_levers_of_the_shortest_step() -> None:
    """A lever that halves the step is used together with offloading; either alone where that is faster."""
    lean = layers(128).priced_for(link=FAST)
    budget = least(step(None)) * 2 // 3
    plan = plan_over(budget, (GROUND, step()), (ONE, lean))
    assert plan.levers[:1] == ("one",)
    slow = layers(2048).priced_for(link=None)
    plan = plan_over(least(step(None)), (GROUND, step()), (ONE, slow))
    assert plan.levers == ("offload_activations",)


def test_nothing_is_evaluated_again_where_only_offload_is_allowed(tight: Plan) -> None:
    plan = plan_over(tight.budget_bytes, (GROUND, step().priced_for(recompute=False)))
    assert plan.moved_bytes > 0
    assert plan.schedule is not None
    assert not plan.schedule.recomputed()
    with pytest.raises(BudgetError):
        plan_over(tight.budget_bytes, (GROUND, step(None).priced_for(recompute=False)))


def test_the_receipt_has_a_row(tight: Plan) -> None:
    *_, last = tight.receipt
    assert last.lever == "offload_activations"
    assert last.peak_bytes == tight.predicted_peak_bytes
    assert last.seconds == tight.step_seconds + tight.added_seconds
    assert tight.receipt[-2].peak_bytes > last.peak_bytes, "what it saves"
    assert "offload_activations" in str(tight)
    assert "host memory for offloads" in tight.table()


def test_what_is_on_the_host_is_on_no_row_of_the_device(tight: Plan) -> None:
    assert tight.joined is not None
    assert tight.schedule is not None
    problem, schedule = tight.joined.problem, tight.schedule
    there = breakdown(problem, replace(schedule, offloads=()), ACCOUNT)
    assert sum(nbytes for _, nbytes in tight.planned.rows) == tight.planned.peak_bytes < there.peak_bytes
    assert held_after_forward(problem, schedule) + tight.host_bytes >= held_after_forward(
        problem, replace(schedule, offloads=())
    )
    assert held_after_forward(problem, schedule) < held_after_forward(problem, replace(schedule, offloads=()))
    rows, plain = module_rows(tight.joined, schedule), module_rows(tight.joined, Schedule.save_all(problem))
    assert sum(row.offloaded_bytes for row in rows) == tight.moved_bytes
    assert sum(row.saved_bytes for row in rows) < sum(row.saved_bytes for row in plain)


def test_saved_plans_keep_it(tight: Plan, tmp_path) -> None:
    tight.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == tight
    assert again.regions[0].offloads == tight.regions[0].offloads != ()
    assert str(again) == str(tight)


def test_another_budget_of_the_same_step(tight: Plan) -> None:
    assert tight.smallest_bytes() == least(step())
    assert tight.at(tight.smallest_gb()).predicted_peak_bytes == tight.smallest_bytes()
    assert tight.diff().summary().endswith("offloaded")


def test_a_retained_graph_keeps_what_it_saved(tight: Plan) -> None:
    assert tight.schedule is not None
    peak = retained_peak(tight, tight.schedule)
    assert tight.predicted_peak_bytes <= peak
    assert peak <= retained_peak(tight, Schedule.save_all(tight.joined.problem)) + tight.moved_bytes


@pytest.mark.slow
def test_the_frontier_has_it(tight: Plan) -> None:
    curve, alone = tight.frontier(6), make_plan(step(None), ACCOUNT, ROOMY).frontier(6)
    assert curve.points[0].added_time < alone.points[0].added_time
    added = [point.added_time for point in curve.points]
    assert added == sorted(added, reverse=True)

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from memopt.errors import BudgetError
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.entry import Entry
from memopt.run.executable import Executable
from tests.planned import ACCOUNT, captured, make_plan, region
from tests.run.pieces import begun_call, moment_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(captured(region(2)), ACCOUNT, 10**6)


def in_progress(waiting_bytes: int, begun: list[Any]) -> CallInProgress:
    moment = moment_of(Entry(nn.Linear(1, 1), 10**6, 0), waiting=1, waiting_bytes=waiting_bytes, closely=True)
    return begun_call(moment, begin=lambda *given: begun.append(given))


def planned_for(call: CallInProgress, plan: Plan) -> list[Situation]:
    """The situations that are planned for until a plan fits, where all plans are `plan`."""
    asked: list[Situation] = []

    def make(situation: Situation, advise: bool) -> Executable:
        asked.append(situation)
        return Executable(captured(region(2)), plan, ())

    call.fitting(make, dict)
    return asked


def test_a_plan_is_too_tight_where_forwards_in_waiting_do_not_fit_beside_it(plan: Plan) -> None:
    room = plan.budget_bytes - plan.ceiling_bytes
    assert planned_for(in_progress(room, []), plan) == [Situation()]
    assert planned_for(in_progress(room + 1, []), plan) == [Situation(), Situation(other_forwards=room + 1)]


@pytest.mark.parametrize(("elsewhere", "gradients_held", "serves"), [(100, False, True), (100, True, False)])
def test_a_plan_for_another_situation_serves_where_it_fits(
    plan: Plan, elsewhere: int, gradients_held: bool, serves: bool
) -> None:
    """A few bytes more or less elsewhere made another plan in each step."""
    room = plan.budget_bytes - plan.ceiling_bytes
    other = replace(plan, account=replace(plan.account, other_forwards=room + elsewhere))
    known = Situation(other_forwards=room + elsewhere, elsewhere=elsewhere, gradients_held=gradients_held)
    asked: list[Situation] = []

    def make(situation: Situation, advise: bool) -> Executable:
        asked.append(situation)
        return Executable(captured(region(2)), plan, ())

    found = in_progress(room + 1, []).fitting(make, lambda: {known: Executable(captured(region(2)), other, ())})
    assert (found.plan is other) is serves
    assert len(asked) == (1 if serves else 2)


def test_a_plan_made_beside_far_more_does_not_serve(plan: Plan) -> None:
    much, moment = plan.budget_bytes // 2, moment_of(Entry(nn.Linear(1, 1), 10**6, 0), waiting=1)
    beside = replace(plan, account=replace(plan.account, other_forwards=much))
    assert moment.still_fits(beside, Situation(other_forwards=much))
    slow = replace(beside, added_seconds=0.5 * plan.step_seconds)
    assert not moment.still_fits(slow, Situation(other_forwards=much))


def test_forwards_that_the_plan_counts_already_are_not_counted_twice(plan: Plan) -> None:
    account = replace(plan.account, other_forwards=1000)
    counted = replace(plan, account=account, budget_bytes=plan.ceiling_bytes)
    assert planned_for(in_progress(1000, []), counted) == [Situation()]
    assert len(planned_for(in_progress(1001, []), counted)) == 2


def test_the_refusal_of_the_last_situation_is_raised(plan: Plan) -> None:
    tight = replace(plan, budget_bytes=plan.ceiling_bytes)

    def make(situation: Situation, advise: bool) -> Executable:
        if situation.other_forwards:
            raise BudgetError(10, 20, "what waits")
        return Executable(captured(region(2)), tight, ())

    with pytest.raises(BudgetError, match="what waits"):
        in_progress(1000, []).fitting(make, dict)


def test_a_forward_begins_in_the_situation_of_its_call(plan: Plan) -> None:
    begun: list[Any] = []
    call = in_progress(123, begun)
    call.begin(plan, exchanges=7)
    assert begun == [(call, plan, 7)]


def test_nothing_takes_the_place_of_the_optimizers_state_on_a_card(plan: Plan) -> None:
    """A backward would refuse what its forward allocates there, such as copies of inputs that may be changed."""
    tight = replace(plan, budget_bytes=plan.ceiling_bytes)
    on_card = replace(tight, account=replace(plan.account, context=1))
    moment = moment_of(Entry(nn.Linear(1, 1), plan.budget_bytes, 0))
    assert moment.left_before_state(tight) == plan.account.optimizer_state
    assert moment.left_before_state(on_card) == moment.entry.state_to_come(on_card, 0, 0) == 0


def test_a_refusal_beside_kept_outputs_is_remembered_and_holds_no_frame(plan: Plan) -> None:
    """Else what a step returned stays until garbage is collected, and each step searches for a plan again."""
    roomy, asked = replace(plan, budget_bytes=10 * plan.budget_bytes), []
    kept = plan.budget_bytes
    moment = moment_of(Entry(nn.Linear(1, 1), plan.budget_bytes, 0), kept_outputs=kept, closely=True)

    def make(situation: Situation, advise: bool) -> Executable:
        asked.append(situation)
        if situation.elsewhere:
            raise BudgetError(10, 20, "kept outputs")
        return Executable(captured(region(2)), plan if len(asked) == 1 else roomy, ())

    class Output:
        pass

    def step() -> weakref.ref[Output]:
        output, call = Output(), begun_call(moment)
        assert call.fitting(make, dict).plan is roomy
        return weakref.ref(output)

    gc.disable()
    try:
        assert step()() is None
        before, asked[:] = len(asked), []
        assert step()() is None
    finally:
        gc.enable()
    assert len(asked) == before - 1

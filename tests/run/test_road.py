"""From a captured call to a plan, and on to code."""

from __future__ import annotations

import pytest
import torch

from memopt.capture.captured_call import CapturedCall
from memopt.errors import BudgetError
from memopt.planning.terms import Situation
from memopt.run.training import TrainingCalls
from tests.run.pieces import Blocks, calls_of, gradients, make

X = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
CALL = ((X,), {})


def captured(calls: TrainingCalls) -> CapturedCall:
    return calls.recorded.capture(CALL)


def inputs(model: Blocks, call: CapturedCall) -> list[torch.Tensor]:
    by_id = {id(parameter): parameter for parameter in model.parameters()}
    region = call.runs[0].region
    return [by_id.get(region.parameter_ids.get(number, 0), X) for number in range(len(region.inputs))]


def test_the_code_that_the_road_ends_with_has_the_plain_gradients() -> None:
    model = make()
    calls = calls_of(model)
    call = captured(calls)
    emitted = calls.road.emit_call(call, CALL, Situation())
    (loss,) = emitted.region.run(*inputs(model, call))
    assert torch.equal(loss, model(X))
    for found, expected in zip(gradients(model, loss), gradients(model, model(X)), strict=True):
        assert torch.equal(found, expected)


def test_a_call_that_was_planned_ahead_is_emitted_by_that_plan() -> None:
    calls = calls_of(make())
    call = captured(calls)
    plan = calls.road.plan(call, CALL, Situation(), advise=False)
    assert calls.road.emit_call(call, CALL, Situation(), plan).plan is plan


def test_a_smaller_budget_recomputes_more_and_too_small_a_one_is_refused() -> None:
    model = make()
    roomy = calls_of(model)
    plan = roomy.road.plan(captured(roomy), CALL, Situation(), advise=False)
    tight = calls_of(model, plan.smallest_gb())
    assert tight.road.plan(captured(tight), CALL, Situation(), advise=False).added_seconds > plan.added_seconds == 0
    small = calls_of(model, 0.9 * plan.smallest_gb())
    with pytest.raises(BudgetError):
        small.road.emit_call(captured(small), CALL, Situation())

"""Offloaded activations in code that inductor compiles."""

from __future__ import annotations

import pytest

import memopt
from examples.models.step import train_step
from memopt.errors import GIB
from passes.ops.offload_ops import host_memory
from tests.end_to_end.steps import assert_equal
from tests.end_to_end.test_inductor import MODE, ROUNDING, batch, budget, compiled, forgotten, make
from tests.linked import ALLOW, linked

__all__ = ["forgotten", "linked"]


@pytest.mark.slow
def test_what_waits_on_the_host_is_not_held(linked: None) -> None:
    plain, budget_gb = compiled(), budget(0.5)
    model = memopt.optimize(make(), budget_gb, backend="inductor", **{**MODE, "allow": ALLOW})
    step = train_step(model, batch())
    plan = memopt.plan_of(model)
    assert_equal(step, plain, ROUNDING)
    assert plan.levers == ("offload_activations",)
    assert step.peak_bytes <= plan.predicted_peak_bytes <= budget_gb * GIB
    assert host_memory("cpu").leased_bytes == 0


@pytest.mark.slow
def test_without_the_lever_the_step_takes_longer(linked: None) -> None:
    model = make()
    options = {**MODE, "backend": "inductor", "example_inputs": batch()}
    memopt.optimize(model, budget(0.5), **options)
    alone = memopt.plan_of(model)
    memopt.optimize(model, budget(0.5), **{**options, "allow": ALLOW})
    assert memopt.plan_of(model).added_seconds < alone.added_seconds

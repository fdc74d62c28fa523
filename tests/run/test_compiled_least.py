"""The smallest budget that a refusal names through a backend that compiles is one in which the compiled code runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.planning.refit import Footprint, as_compiled
from memopt.planning.stages import StepOfPlan
from memopt.run import kept_plans, road

MODE: dict[str, Any] = {"backend": "inductor", "precision": "fp32", "optimizer": None, "allow": {"recompute"}}


def job() -> tuple[nn.Module, tuple[torch.Tensor]]:
    """A model whose activations are larger than its parameters, and a batch."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return Mean(*blocks).train(), (torch.randn(2048, 32),)


class Mean(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


@pytest.fixture(autouse=True)
def _more_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code holds 100,000 bytes more than it does."""

    def larger(plan: Plan, footprints: Sequence[Footprint]) -> Plan:
        (footprint,) = footprints
        more = {name: getattr(footprint, name) + 100_000 for name in ("forward_bytes", "backward_bytes")}
        return as_compiled(plan, [replace(footprint, **more)])

    for module in (kept_plans, road):
        monkeypatch.setattr(module, "as_compiled", larger)


def refused_gb(model: nn.Module, batch: Any, budget_gb: float) -> float:
    with pytest.raises(memopt.BudgetError, match="the smallest that works") as refusal:
        memopt.optimize(model, budget_gb, example_inputs=batch, **MODE)
    return refusal.value.smallest_gb


@pytest.mark.slow
def test_the_budget_that_a_refusal_names_runs_and_less_is_refused() -> None:
    model, batch = job()
    memopt.optimize(model, 1000.0, example_inputs=batch, **MODE)
    plan = memopt.plan_of(model)
    asked_ahead_gb = plan.smallest_gb()
    least_gb = refused_gb(model, batch, 1e-6)
    assert least_gb == asked_ahead_gb
    assert isinstance(plan.source, StepOfPlan)
    assert least_gb > replace(plan.source, compiled_bytes=None).smallest_bytes(plan) / GIB
    assert refused_gb(model, batch, 0.995 * least_gb) == least_gb
    memopt.optimize(model, least_gb, example_inputs=batch, **MODE)
    model(*batch).backward()
    assert memopt.plan_of(model).predicted_peak_gb <= least_gb


@pytest.mark.slow
def test_a_first_call_is_refused_with_the_same_figure() -> None:
    model, batch = job()
    memopt.optimize(model, 1000.0, example_inputs=batch, **MODE)
    least_gb = refused_gb(model, batch, 1e-6)
    other, _ = job()
    memopt.optimize(other, 1e-6, **MODE)
    with pytest.raises(memopt.BudgetError, match="the smallest that works") as refusal:
        other(*batch)
    assert refusal.value.smallest_gb == least_gb


def test_the_budget_that_a_refusal_names_is_met_by_the_plan_that_it_was_named_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    as_compiled_least = road.as_compiled_least

    def noting(refusal: memopt.BudgetError, *call: Any) -> memopt.BudgetError:
        asked.append(call)
        return as_compiled_least(refusal, *call)

    monkeypatch.setattr(road, "as_compiled_least", noting)
    refused_gb(*job(), 1e-6)
    (recorded, _emit), *_ = asked
    ((_, _, plan),) = (known for _, known in recorded.planner.compiled_least.items())
    for unforeseen in (0, 1000):  # bytes that lie beside the step later do not change its smallest schedule
        recorded.planner.accounts.unforeseen_bytes = unforeseen
        again = kept_plans.smallest_plan(plan.budget_bytes, recorded)
        assert again is not None
        assert again.regions is plan.regions
        assert again.predicted_peak_bytes == plan.predicted_peak_bytes + unforeseen


@pytest.mark.slow
def test_a_plan_that_runs_and_one_from_disk_are_asked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = job()
    memopt.optimize(model, 0.5, example_inputs=batch, **MODE)
    ahead_gb = memopt.plan_of(model).smallest_gb()
    model(*batch).backward()
    assert memopt.plan_of(model).smallest_gb() == ahead_gb
    memopt.remove(model)
    del model
    again, _ = job()
    memopt.optimize(again, 0.5, example_inputs=batch, **MODE)
    assert memopt.plan_of(again).smallest_gb() == ahead_gb
    memopt.optimize(again, ahead_gb, example_inputs=batch, **MODE)
    again(*batch).backward()
    assert memopt.plan_of(again).predicted_peak_gb <= ahead_gb

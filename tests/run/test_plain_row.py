"""The first row of a plan's levers is the plain step, as the user runs it; the last one is the plan."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.levers.precision import PRECISION
from memopt.planning.plan import CAPTURE, PLAIN_STEP, Plan


class Blocks(nn.Module):
    """Three blocks, whose widest values are most of the step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


BATCH = (torch.randn(64, 64, 64),)


def planned(budget_gb: float = 1.0, **options: Any) -> Plan:
    return memopt.plan(Blocks(), budget_gb, BATCH, **{"precision": "fp32", "allow": {"recompute"}, **options})


def names(plan: Plan) -> list[str]:
    return [row.lever for row in plan.receipt]


def measured() -> int:
    gc.collect()  # what other tests have left in circles is not the step's
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with memopt.measure_peak() as peak:
            model(*BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()
    return peak.bytes


def test_it_is_what_the_plain_step_takes() -> None:
    plan = planned()
    assert names(plan)[:2] == [PLAIN_STEP, CAPTURE]
    beside = plan.account.elsewhere
    assert plan.receipt[0].peak_bytes - beside == pytest.approx(measured(), rel=0.05)
    assert plan.receipt[0].seconds == pytest.approx(plan.receipt[1].seconds, rel=0.1)


class Upwards(nn.Module):
    """As a U-Net's second half; rules allow its convolutions several times the workspace that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.ConvTranspose2d(24, 12, 4, 2, 1), nn.ConvTranspose2d(12, 3, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.up(x).relu()).square().mean()


def test_workspaces_of_the_plain_step_are_measured() -> None:
    """The captured step takes 1.98 MB, the plain one 2.63; by the rules it would take 5.74."""
    plan = memopt.plan(Upwards(), 1.0, (torch.randn(8, 24, 16, 16),), precision="fp32", allow={"recompute"})
    assert plan.receipt[0].peak_bytes < 1.5 * plan.receipt[1].peak_bytes


def test_rows_lead_to_the_plan() -> None:
    roomy = planned()
    tight = roomy.at(0.6 * roomy.predicted_peak_gb)
    for plan in (planned(0.6 * roomy.predicted_peak_gb), tight):
        assert names(plan) == [PLAIN_STEP, CAPTURE, "recompute"]
        assert plan.receipt[-1].peak_bytes == plan.predicted_peak_bytes
        assert plan.receipt[0] == roomy.receipt[0]
        assert f"({PLAIN_STEP} " in " ".join(str(plan).split())
    assert roomy.at(1.0).receipt == roomy.receipt


def test_precision_is_a_row_and_the_plain_step_has_its_own() -> None:
    low, full = planned(precision="bf16"), planned()
    assert names(low)[:2] == [PLAIN_STEP, PRECISION.name]
    assert low.receipt[0].peak_bytes == pytest.approx(full.receipt[0].peak_bytes, rel=0.01)
    assert low.receipt[1].peak_bytes < 0.8 * low.receipt[0].peak_bytes


def test_within_autocast_of_one_s_own_the_plain_step_is_that() -> None:
    full = planned()
    with torch.autocast("cpu", torch.bfloat16):
        own, named = planned(precision="auto"), planned(precision="bf16")
    assert own.receipt[0].peak_bytes == named.receipt[0].peak_bytes < 0.9 * full.receipt[0].peak_bytes
    assert (names(own)[1], names(named)[1]) == (CAPTURE, PRECISION.name)


def test_of_plans_that_training_calls_make() -> None:
    ahead, model = planned(), Blocks()
    memopt.optimize(model, 0.7 * ahead.predicted_peak_gb, precision="fp32", allow={"recompute"})
    model(*BATCH).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss = model(*BATCH)
    plan = memopt.plan_of(model)  # while a forward waits
    assert memopt.plan_of(model) is plan
    loss.backward()
    assert all(
        torch.equal(parameter.grad, before) for parameter, before in zip(model.parameters(), expected, strict=True)
    )
    assert names(plan) == [PLAIN_STEP, CAPTURE, "recompute"]
    first = plan.receipt[0].peak_bytes - plan.account.elsewhere
    assert first == pytest.approx(ahead.receipt[0].peak_bytes - ahead.account.elsewhere, rel=0.01)


def test_of_training_calls_within_autocast_of_one_s_own() -> None:
    full, model = planned(), Blocks()
    memopt.optimize(model, 0.5 * full.predicted_peak_gb, allow={"recompute"})
    with torch.autocast("cpu", torch.bfloat16):
        model(*BATCH).backward()
    plan = memopt.plan_of(model)
    assert names(plan)[0] == PLAIN_STEP
    assert plan.receipt[0].peak_bytes < 0.9 * full.receipt[0].peak_bytes


def test_of_kept_plans_that_training_calls_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MEMOPT_CACHE", "1")
    budget, models = 0.7 * planned().predicted_peak_gb, [Blocks(), Blocks()]
    options: Any = {"precision": "fp32", "allow": {"recompute"}}
    memopt.optimize(models[0], budget, **options)
    models[0](*BATCH).backward()
    memopt.optimize(models[1], budget, example_inputs=BATCH, **options)
    assert names(memopt.plan_of(models[1]))[0] == PLAIN_STEP


def test_where_it_cannot_be_counted_rows_begin_with_the_captured_step() -> None:
    model = Blocks()
    model.blocks[0].register_forward_hook(lambda *_: None)
    plan = memopt.plan(model, 1.0, BATCH, precision="fp32", allow={"recompute"})
    assert names(plan)[0] == ""
    assert "(as captured " in " ".join(str(plan).split())


def test_without_memory_it_is_counted_too() -> None:
    class Shifted(Blocks):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    here = memopt.plan(Shifted(), 1.0, BATCH, precision="fp32", device="cpu")
    model, batch = Shifted().to("meta"), (BATCH[0].to("meta"),)
    assert memopt.plan(model, 1.0, batch, precision="fp32", device="cpu").receipt == here.receipt
    assert names(here)[0] == PLAIN_STEP


def test_levers_on_the_optimizer_are_a_row() -> None:
    """Rows add up to the plan where an optimiser's lever makes it fit."""

    class Wide(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum()

    def plan(budget_gb: float) -> Plan:
        model, batch = Wide(*(nn.Linear(512, 512) for _ in range(6))), (torch.randn(4, 512),)
        return memopt.plan(model, budget_gb, batch, precision="fp32", allow={"recompute", "optimizer_in_backward"})

    found = plan(0.85 * plan(1.0).predicted_peak_gb)
    assert found.proposals == ("optimizer_in_backward",)
    assert names(found)[2] == "optimizer_in_backward"
    assert found.receipt[-1].peak_bytes == found.predicted_peak_bytes

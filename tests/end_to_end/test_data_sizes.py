"""Sizes that depend on data: planned as seen, guarded, and planned once more before a larger size takes its memory."""

from __future__ import annotations

import pytest
import torch

import memopt
from examples.models.families import BY_NAME
from examples.models.step import train_step
from memopt.capture.data_sizes import MARGIN, DataSizes
from memopt.errors import GIB
from tests.end_to_end.steps import assert_equal
from tests.marks import slow


def send_all_to_one_expert(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name or "gate" in name:
                parameter.zero_()
                parameter[0].fill_(1.0)


@pytest.mark.slow
def test_a_batch_that_outgrows_the_plan_is_planned_anew() -> None:
    family = BY_NAME["moe"]
    model, batch = family.make(), family.batch("usual")
    even = train_step(model, batch)
    smallest = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute"}).smallest_gb()
    budget_gb = smallest + 0.7 * (even.peak_bytes / GIB - smallest)
    memopt.optimize(model, budget_gb, optimizer=None, precision="fp32", allow={"recompute"})
    assert_equal(train_step(model, batch), even)
    first = memopt.plan_of(model)

    send_all_to_one_expert(model)
    ours = train_step(model, batch)
    second = memopt.plan_of(model)
    memopt.remove(model)
    assert_equal(ours, train_step(model, batch))
    assert second.captured is not None
    assert first.captured is not None
    assert second.captured.data_sizes != first.captured.data_sizes
    assert ours.peak_bytes <= second.predicted_peak_bytes <= 1.02 * ours.peak_bytes
    assert ours.peak_bytes <= budget_gb * GIB


@pytest.mark.slow
def test_fakes_are_planned_for_the_largest_sizes() -> None:
    family = BY_NAME["moe"]
    model, batch = family.make(), family.batch("usual")
    seen = memopt.plan(model, 1000, batch, optimizer=None, precision="fp32", allow={"recompute"})
    largest = memopt.plan(
        model.to("meta"), 1000, {k: v.to("meta") for k, v in batch.items()}, optimizer=None, precision="fp32"
    )
    assert largest.plain_peak_gb > seen.plain_peak_gb
    assert not largest.notes
    assert "planned for up to" in seen.notes[0]


def test_allowance_never_shrinks() -> None:
    first = DataSizes.of({"u0": 100, "u1": 10})
    assert first.allowed == {"u0": 100 * MARGIN, "u1": 13}
    assert DataSizes.of({"u0": 40, "u1": 20}, first).allowed == {"u0": 125, "u1": 25}


@pytest.mark.parametrize("family", [BY_NAME["gpt2-sdpa"], slow(BY_NAME["mixtral"])], ids=str)
def test_models_without_such_sizes_are_not_run_ahead(family, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = "memopt.planning.call_planner.observe"
    monkeypatch.setattr(ran, lambda *_: pytest.fail("ran the forward to observe sizes"))
    memopt.plan(family.make(), 1000, family.batch("usual"), optimizer=None, precision="fp32", allow={"recompute"})

"""A call whose plain step fits the budget is not planned: the plain model runs, as fast as it does without memopt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from examples.models.families import BY_NAME, loss_of
from memopt.account.account import BOOKKEEPING_BYTES
from memopt.capture.region import RecordedRegion
from memopt.run.beside import Beside
from memopt.run.planned_call import planned_call_of

FP32: dict[str, Any] = {"precision": "fp32"}


@pytest.fixture(autouse=True)
def plain_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMOPT_PLAN")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[RecordedRegion]:
    """The regions that were captured."""
    found: list[RecordedRegion] = []
    record = RecordedRegion.record.__func__  # type: ignore[attr-defined]

    def counted(cls: Any, *args: Any, **kwargs: Any) -> RecordedRegion:
        found.append(record(cls, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(RecordedRegion, "record", classmethod(counted))
    return found


def plain_peak(model: nn.Module, batch: dict[str, Any]) -> float:
    return memopt.plan(copy.deepcopy(model), 1, batch, outputs="all", **FP32).plain_peak_gb


def train(model: nn.Module, batches: list[dict[str, Any]]) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["gpt2-sdpa", "llama", "resnet"])
def test_a_job_that_fits_is_not_captured(name: str, captures: list[RecordedRegion]) -> None:
    family = BY_NAME[name]
    batches = [family.batch(scale) for scale in ("usual", "shorter", "longer", "usual")]
    plain = family.make()
    model = copy.deepcopy(plain)
    memopt.optimize(model, 1, **FP32)
    assert train(model, batches) == train(plain, batches)
    assert not captures
    assert memopt.plan_of(model).added_time == 0  # made when it is asked for


@pytest.mark.parametrize("name", ["gpt2-sdpa", "bert"])
def test_the_count_is_what_the_step_holds(name: str) -> None:
    family = BY_NAME[name]
    model, batch = family.make(), family.batch("usual")
    memopt.optimize(model, 1, **FP32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with memopt.measure_peak() as peak:
            outputs = model(**batch)  # held through the backward
            loss_of(outputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        del outputs
    call = planned_call_of(model)
    assert call is not None
    (kind,) = call.forward.plain_calls._kinds.values()
    ((_, fitting),) = kind.fitting
    step = fitting.step
    assert peak.allocated_bytes - BOOKKEEPING_BYTES <= step.peak_bytes <= 1.02 * peak.allocated_bytes


def test_a_call_that_does_not_fit_is_planned(captures: list[RecordedRegion]) -> None:
    family = BY_NAME["gpt2-sdpa"]
    model = family.make()
    budget = 1.1 * plain_peak(model, family.batch("usual"))
    captures.clear()
    memopt.optimize(model, budget, **FP32)
    train(model, [family.batch("usual"), family.batch("shorter")])
    assert not captures
    train(model, [family.batch("longer")])
    assert len(captures) == 1
    assert memopt.plan_of(model).predicted_peak_gb <= budget


def test_a_plain_forward_in_waiting_is_counted() -> None:
    family = BY_NAME["gpt2-sdpa"]
    model, batch = family.make(), family.batch("usual")
    memopt.optimize(model, 1, **FP32)
    pending = planned_call_of(model).forward.surroundings.pending  # type: ignore[union-attr]
    loss = loss_of(model(**batch))
    assert pending.held_bytes > 0
    loss.backward()
    assert pending.held_bytes == 0
    loss = loss_of(model(**batch))
    assert pending.held_bytes > 0
    del loss
    assert pending.held_bytes == 0


def test_what_else_a_plan_does_is_planned(captures: list[RecordedRegion]) -> None:
    family = BY_NAME["gpt2-sdpa"]
    model = family.make()
    memopt.optimize(model, 1, precision="bf16")
    train(model, [family.batch("usual")])
    assert len(captures) == 1


def test_the_count_leaves_no_trace() -> None:
    family = BY_NAME["resnet"]
    model, batch = family.make(), family.batch("usual")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    memopt.optimize(model, 1, **FP32)
    call = planned_call_of(model)
    assert call is not None
    assert (
        call.forward.plain_calls.step_if_it_fits(((), batch), call.forward.surroundings.situation(), Beside())
        is not None
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)

"""A loop with Accelerate by memopt's `prepare`: the same numbers within the budget, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.api import plan_of
from tests.integrations.training import BUDGET_GB, EXACT, Run, assert_same, assert_within, batches, gpt2

pytest.importorskip("accelerate")

from accelerate import Accelerator

from memopt.integrations.accelerate import prepare

ACCUMULATED = 2


def train(budget_gb: float | None, *, steps: int = 3, save: Path | None = None, load: Path | None = None) -> Run:
    """Train with two batches for each step; of the steps after `load`, only those that are left."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model: Any = gpt2()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget_gb is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer = prepare(accelerator, model, optimizer, budget_gb=budget_gb, **EXACT)
    torch.manual_seed(0)
    data, run = list(batches(ACCUMULATED * steps)), Run()
    if load is not None:
        accelerator.load_state(str(load))
        data = data[len(data) // 2 :]
    for number, batch in enumerate(data):
        with run.measured(), accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.item())
        if save is not None and number + 1 == len(data) // 2:
            accelerator.save_state(str(save))
    if budget_gb is not None:
        assert plan_of(accelerator.unwrap_model(model)).regions
    return run.ended(accelerator.unwrap_model(model))


@pytest.mark.slow
def test_accumulation_within_a_budget() -> None:
    plain, run = train(None), train(BUDGET_GB)
    assert_same(run, plain)
    assert_within(run, BUDGET_GB, plain)


@pytest.mark.slow
def test_resumes(tmp_path: Path) -> None:
    plain = train(None, steps=4)
    train(BUDGET_GB, steps=4, save=tmp_path)
    resumed = train(BUDGET_GB, steps=4, load=tmp_path)
    assert resumed.losses == plain.losses[4:]
    assert_same(resumed, Run(resumed.losses, plain.weights))


def test_what_is_prepared_must_be_one_model_with_its_optimizer() -> None:
    accelerator, model = Accelerator(cpu=True), gpt2()
    with pytest.raises(ValueError, match="exactly one trained model, not 2"):
        prepare(accelerator, model, gpt2(), budget_gb=1)
    with pytest.raises(ValueError, match="the training has 0 optimizers"):
        prepare(accelerator, model, budget_gb=1)
    assert prepare(accelerator, model, budget_gb=1, optimizer="adamw") is model

"""Models that memopt optimised take the same steps as plain ones, within their budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import Record, gpt2, normals, record, same, weights

BATCHES = [pieces.uneven_text(8, 32, seed=seed) for seed in range(2)]


def trained(model: nn.Module, batches: list[Any], **options: Any) -> tuple[Record, list[Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = TrainStep(model, optimizer, 1.0, scheduler, **options)
    torch.manual_seed(5)
    return record(step, batches), weights(model)


def tight(model: nn.Module, batch: Any, **options: Any) -> nn.Module:
    options = {"precision": "fp32", "allow": {"recompute"}, **options}
    plan = memopt.plan(model, 1, batch, **options)
    return memopt.optimize(model, plan.smallest_gb() * 1.1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_model_with_its_loss(microbatches: int) -> None:
    expected, plain = trained(gpt2(), BATCHES, microbatches=microbatches)
    model = tight(gpt2(), BATCHES[0])
    found, ours = trained(model, BATCHES, microbatches=microbatches)
    assert found == expected
    assert same(ours, plain)
    assert memopt.plan_of(model).added_time > 0, "something was recomputed"


def body() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)))


@pytest.mark.plans_always
def test_a_model_with_a_loss_function() -> None:
    batches = [(normals(64, 32, seed=seed), normals(64, 32, seed=seed + 50)) for seed in range(3)]
    loss_fn = nn.functional.mse_loss
    expected, plain = trained(pieces.seeded(body)(), batches, loss_fn=loss_fn, microbatches=2)
    model = tight(pieces.seeded(body)(), batches[0], loss_fn=loss_fn)
    found, ours = trained(model, batches, microbatches=2)
    assert found == expected
    assert same(ours, plain)


@pytest.mark.slow
def test_a_scaler_of_ones_own() -> None:
    """Gradients are scaled outside of the planned region, by powers of two: nothing changes but the scale."""
    expected, plain = trained(gpt2(), BATCHES)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    found, ours = trained(tight(gpt2(), BATCHES[0]), BATCHES, scaler=scaler)
    assert found.scales == [64.0, 64.0]
    assert found.losses[0] == expected.losses[0]
    assert pieces.largest_error(ours, plain) < 1e-4


def test_what_an_optimised_model_refuses() -> None:
    model = memopt.optimize(gpt2(), 1, precision="fp32")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match=r"give memopt\.optimize a precision"):
        TrainStep(model, optimizer, autocast=torch.bfloat16)
    step = TrainStep(memopt.remove(model), optimizer, autocast=torch.bfloat16)
    memopt.optimize(model, 1, precision="fp32")
    with pytest.raises(ValueError, match=r"give memopt\.optimize a precision"):
        step(BATCHES[0])
    model.eval()
    with pytest.raises(ValueError, match="eval mode"):
        TrainStep(model, optimizer)(BATCHES[0])


def test_a_budget_too_small_changes_nothing() -> None:
    loss_fn = nn.functional.mse_loss
    model = memopt.optimize(body(), 0.0001, precision="fp32", allow={"recompute"}, loss_fn=loss_fn)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn)
    before = weights(model)
    with pytest.raises(memopt.BudgetError):
        step((normals(64, 32), normals(64, 32)))
    assert same(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())

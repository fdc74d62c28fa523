"""Bad input: what is said, and that nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import points, regression, same, weights


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({}, ValueError),
        ([], ValueError),
        (points(9), ValueError),
        ((points(8)[0], points(6)[1]), ValueError),
        ("text", TypeError),
    ],
)
def test_bad_batches_change_nothing(batch: Any, error: type[Exception]) -> None:
    model = regression()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), microbatches=2, accumulate=2)
    step(points())
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    with pytest.raises(error):
        step(batch)
    assert torch.equal(torch.get_rng_state(), state), "nothing was run"
    assert same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], gradients)
    assert step(points()).stepped


def test_bad_losses_change_nothing() -> None:
    model = nn.Linear(pieces.WIDTH, 1)
    step = TrainStep(model, torch.optim.SGD(model.parameters()))
    before = weights(model)
    with pytest.raises(ValueError, match=r"must be a scalar, but its shape is \(8, 1\)"):
        step(points()[0])
    with torch.no_grad(), pytest.raises(ValueError, match="no gradient"):
        step(points(1)[0])
    with pytest.raises(TypeError, match="no loss in the str"):
        TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=lambda *_: "low")(points())
    elsewhere = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="no parameter of the optimizers got a gradient"):
        TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn=lambda *_: elsewhere * 2)(points())
    assert same(weights(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_sparse_gradients_change_nothing() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    step = TrainStep(
        model, torch.optim.SparseAdam(model.parameters()), loss_fn=lambda output, _: output.square().mean()
    )
    before = weights(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"shape \(10, 4\) is sparse.*sparse=False"):
            step((torch.arange(3), None))
    assert same(weights(model), before)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scaler": 1024.0}, TypeError, "torch.amp.GradScaler, or None .* not 1024.0"),
        ({"scaler": True}, TypeError, "not True"),
        ({"loss_fn": "mse"}, TypeError, "loss_fn must be a function, not 'mse'"),
        ({"count": 3}, TypeError, "count must be a function, not 3"),
        ({"autocast": "fp16"}, ValueError, "torch.float16, torch.bfloat16 or None, not 'fp16'"),
        ({"autocast": torch.float32}, ValueError, "not torch.float32"),
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1, not 0"),
        ({"microbatches": 2.0}, TypeError, r"microbatches must be a whole number, not 2\.0"),
        ({"max_grad_norm": -1}, ValueError, "max_grad_norm must be positive"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = regression()
    with pytest.raises(error, match=message):
        TrainStep(model, torch.optim.SGD(model.parameters()), **options)


def test_a_model_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        TrainStep("gpt2", torch.optim.SGD(regression().parameters()))  # type: ignore[arg-type]

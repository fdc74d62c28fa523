"""The state of step, model and gradients after a call that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import points, regression, same, weights


class Fails(pieces.Regression):
    """Fails in its n-th call."""

    calls, at, error = 0, 0, MemoryError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise self.error("out of it")
        return super().forward(x, y)


@pytest.mark.parametrize("at", [1, 2])
def test_a_first_call_that_fails_leaves_gradients_as_they_were(at: int) -> None:
    model: Any = pieces.seeded(Fails)()
    nn.functional.mse_loss(model.head(model.body(points()[0])).squeeze(-1), points()[1]).backward()
    held = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in held]
    step = TrainStep(model, torch.optim.SGD(model.parameters()), microbatches=2)
    model.at = at
    with pytest.raises(MemoryError):
        step(points())
    assert all(each.grad is kept for each, kept in zip(model.parameters(), held, strict=True))
    assert same(held, values)
    assert step(points()).stepped


def test_a_later_call_that_fails_at_once_can_be_given_again() -> None:
    model: Any = pieces.seeded(Fails)().eval()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), accumulate=2)
    step(points(seed=1))
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.at = 2
    with pytest.raises(MemoryError):
        step(points(seed=2))
    assert same([parameter.grad for parameter in model.parameters()], kept)
    result = step(points(seed=2))
    assert result.stepped
    whole = regression().eval()
    other = TrainStep(whole, torch.optim.SGD(whole.parameters()))
    assert float(other([points(seed=1), points(seed=2)]).loss) == pytest.approx(float(result.loss))
    assert pieces.largest_error(weights(model), weights(whole)) < 1e-6


def test_a_later_call_that_fails_amid_gives_the_effective_batch_up() -> None:
    model: Any = pieces.seeded(Fails)()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), accumulate=2, microbatches=2)
    step(points())
    model.at = 4
    with pytest.raises(MemoryError):
        step(points())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [step(points()).complete for _ in range(2)] == [False, True]


def test_an_optimizer_that_fails_leaves_the_scaler_usable() -> None:
    model = regression()
    optimizer = torch.optim.SGD(model.parameters())
    step = TrainStep(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=64.0))

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        step(points())
    handle.remove()
    result = step(points())
    assert result.stepped
    assert float(result.scale) == 64.0

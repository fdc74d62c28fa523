"""The step as a whole: several optimisers, one norm, and what is skipped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt import TrainStep
from tests.train import pieces
from tests.train.pieces import points, regression, same, weights

NAN, INF = float("nan"), float("inf")


def two_optimizers(model: Any, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.body.parameters(), **options), torch.optim.SGD(model.head.parameters(), lr=0.1)]


def test_two_optimizers_two_schedulers_one_norm() -> None:
    theirs, ours = regression(), regression()
    by_hand = two_optimizers(theirs)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(by_hand[0], 0.5), None]
    torch.manual_seed(1)
    norms = []
    for seed in range(3):
        theirs(*points(seed=seed)).backward()
        norms.append(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1).item())
        for optimizer in by_hand:
            optimizer.step()
            optimizer.zero_grad()
        assert schedulers[0] is not None
        schedulers[0].step()

    optimizers = two_optimizers(ours)
    both = [
        torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.5),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 100),
    ]
    step = TrainStep(ours, optimizers, 0.1, both)
    torch.manual_seed(1)
    results = [step(points(seed=seed)) for seed in range(3)]
    assert [float(result.grad_norm) for result in results if result.grad_norm is not None] == norms
    assert min(norms) > 0.1, "clipping acts"
    assert same(weights(ours), weights(theirs))
    assert [scheduler.last_epoch for scheduler in both] == [3, 3]


def test_the_norm_is_unscaled_and_there_without_clipping() -> None:
    norms = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = regression().eval()
        step = TrainStep(model, torch.optim.SGD(model.parameters()), max_grad_norm=None, scaler=scaler)
        result = step(points())
        assert result.grad_norm is not None
        norms.append(float(result.grad_norm))
    assert norms[0] == norms[1] > 0


class Weighted(pieces.Regression):
    """Multiplies its loss by a factor, and its gradients by another."""

    factor, gradient_factor = 1.0, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        factor = self.gradient_factor
        if factor != 1:
            loss.register_hook(lambda gradient: gradient * factor)
        return loss.detach() * (self.factor - 1) + loss


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"factor": NAN}, "its loss is nan;"),
        ({"factor": INF}, "its loss is inf;"),
        ({"gradient_factor": NAN}, "but not all of its gradients are finite;"),
    ],
)
def test_what_is_not_finite_steps_nothing_and_is_said_once(spoil: dict[str, float], reason: str, fused: bool) -> None:
    model: Any = pieces.seeded(Weighted)()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = TrainStep(model, optimizer, scheduler=scheduler)
    assert step(points()).stepped
    before, state = weights(model), [state["exp_avg"].clone() for state in optimizer.state.values()]
    vars(model).update(spoil)
    with pytest.warns(RuntimeWarning, match=f"step 2 was skipped: .*{reason}"):
        result = step(points())
    assert result.skipped
    assert not result.stepped
    assert result.complete
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = step(points())
    assert result.skipped
    assert same(weights(model), before)
    assert same([state["exp_avg"] for state in optimizer.state.values()], state)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert scheduler.last_epoch == 1
    assert float(result.scale) == 1.0
    model.factor = model.gradient_factor = 1.0
    assert step(points()).stepped
    assert step.number == 4


def test_an_overflow_that_a_smaller_scale_mends_is_not_warned_of() -> None:
    model = regression()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    step = TrainStep(model, torch.optim.SGD(model.parameters()), scaler=scaler, autocast=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(points()).skipped
    model.head.weight.data.fill_(float("nan"))
    with pytest.warns(RuntimeWarning, match="step 2 was skipped: its loss is nan"):
        assert step(points()).skipped


def test_an_optimizer_without_gradients_waits() -> None:
    """As the discriminator's does in a generator's step; GradScaler refuses it."""
    model = regression()
    model.body.requires_grad_(False)
    before = weights(model.body)
    assert TrainStep(model, two_optimizers(model))(points()).stepped
    assert same(weights(model.body), before)


def test_old_gradients_are_not_part_of_the_step() -> None:
    norms = []
    for old in (False, True):
        model = regression().eval()
        if old:
            model(*points(seed=9)).backward()
        result = TrainStep(model, torch.optim.SGD(model.parameters()))(points())
        norms.append(float(result.grad_norm))  # type: ignore[arg-type]
        assert all(parameter.grad is None for parameter in model.parameters())
    assert norms[0] == norms[1]

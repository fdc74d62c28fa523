"""A run with delayed 8-bit scaling that is resumed from its state dicts is bitwise the run that was not stopped."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt import TrainStep
from tests.smallest import smallest_gb

ALLOW = {"fp8_delayed"}


class Mlp(nn.Module):
    """17 linear layers, all but the last of which multiply in 8 bits; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [module for _ in range(16) for module in (nn.Linear(64, 64), nn.GELU())]
        self.body = nn.Sequential(*hidden, nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x).float() - y).square().mean()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # The magnitudes fall from batch to batch, so that the largest of those before gives another scale than the last.
    return {
        "x": torch.randn(1024, 64, generator=generator) * 2.0 ** (-seed),
        "y": torch.randn(1024, 16, generator=generator),
    }


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@cache
def budget_gb() -> float:
    model, optimizer = fresh()
    return smallest_gb(model, batch(0), optimizer=optimizer, precision="bf16", allow=ALLOW)


def built() -> tuple[nn.Module, TrainStep]:
    model, optimizer = fresh()
    memopt.optimize(model, budget_gb(), optimizer=optimizer, precision="bf16", allow=ALLOW, backend="aten")
    return model, TrainStep(model, optimizer)


def saved(model: nn.Module, step: TrainStep) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": step.state_dict()}, file)
    return file.getvalue()


def resumed(file: bytes) -> tuple[nn.Module, TrainStep]:
    model, step = built()
    state: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    model.load_state_dict(state["model"])
    step.load_state_dict(state["step"])
    return model, step


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [0, 1, 3])
def test_losses_after_resuming_are_bitwise_those_of_the_run_that_went_on(killed_after: int) -> None:
    model, step = built()
    for seed in range(killed_after):
        step(batch(seed))
    file = saved(model, step)
    expected = [float(step(batch(seed)).loss) for seed in range(killed_after, 6)]
    assert memopt.plan_of(model).levers == ("fp8_delayed",)

    model, step = resumed(file)
    assert [float(step(batch(seed)).loss) for seed in range(killed_after, 6)] == expected

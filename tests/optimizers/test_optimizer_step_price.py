"""Prices of an optimiser's step: what is tried on fakes, for fresh and for used optimisers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

import memopt
from memopt.device import hardware
from memopt.optimizers import OffloadedOptimizer
from memopt.optimizers import optimizer_step_price as step_price
from memopt.optimizers.optimizer_step_price import NOTHING, OptimizerStepPrice, optimizer_step_price, prices_of_each
from memopt.optimizers.parameterwise import PIECE_ELEMENTS
from tests.marks import slow

A100 = hardware("a100-80")
USED = [optim.AdamW, optim.Adafactor, optim.RMSprop, optim.RAdam, optim.NAdam, optim.Adamax]


def used(make: Callable[..., optim.Optimizer], model: nn.Module, **options: Any) -> optim.Optimizer:
    """An optimiser after one step, with state for every parameter."""
    optimizer = make(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_no_optimizer_costs_nothing() -> None:
    assert optimizer_step_price(None, [torch.zeros(3)], A100) == NOTHING
    assert optimizer_step_price(optim.SGD, [], A100) == NOTHING
    assert prices_of_each(None, [torch.zeros(3)], [torch.float32], A100) == [NOTHING]


@pytest.mark.parametrize("make", USED)
def test_a_used_optimizer_is_priced_like_a_fresh_one(make: Callable[..., optim.Optimizer]) -> None:
    model = nn.Linear(64, 64)
    optimizer = used(make, model)
    number = next(iter(optimizer.state.values()))["step"]
    fresh = optimizer_step_price(make, list(model.parameters()), hardware("cpu"))
    assert optimizer_step_price(optimizer, list(model.parameters()), hardware("cpu")) == fresh
    assert next(iter(optimizer.state.values()))["step"] is number
    assert int(number) == 1, "the optimiser itself did not step"


def test_a_used_optimizer_is_priced_parameter_by_parameter() -> None:
    model = nn.Linear(64, 64)
    dtypes = [torch.float32, torch.float32]
    found = prices_of_each(used(optim.AdamW, model), list(model.parameters()), dtypes, hardware("cpu"))
    assert found == prices_of_each(optim.AdamW, list(model.parameters()), dtypes, hardware("cpu"))
    weight, bias = found
    assert weight.state_bytes == 2 * model.weight.nbytes + 4
    assert bias.arrays == (model.bias.nbytes, model.bias.nbytes)


def test_pieces_beyond_the_third_cost_what_the_third_did() -> None:
    """A parameter of many pieces is tried with few, so that its price does not take the time of all."""
    wraps = (OffloadedOptimizer,)
    small, large = (
        prices_of_each(optim.AdamW, [torch.empty(many * PIECE_ELEMENTS, device="meta")], [torch.float32], A100, wraps)[
            0
        ]
        for many in (4, 8)
    )
    assert isinstance(small, OptimizerStepPrice)
    assert large.temporary_bytes == small.temporary_bytes
    assert large.seconds == pytest.approx(2 * small.seconds, rel=0.05)


def test_a_class_is_tried_once_and_an_instance_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for the same prices with each combination of proposals; an instance may have other state by then."""
    tried, model, original = list[Any](), nn.Linear(23, 29), step_price._tried

    def counted(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(step_price, "_tried", counted)
    for optimizer, trials in ((optim.AdamW, 2), (optim.AdamW, 0), (optim.AdamW(model.parameters()), 2)):
        tried.clear()
        found = prices_of_each(optimizer, list(model.parameters()), [torch.float32] * 2, hardware("cpu"))
        assert len(tried) == trials
        assert [price.state_bytes for price in found] == [2 * 4 * 23 * 29 + 4, 2 * 4 * 29 + 4]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(torch.tanh(self.first(x))).pow(2).mean()
        return loss


@pytest.mark.parametrize("make", [optim.AdamW, slow(optim.Adafactor), slow(optim.RMSprop)])
def test_a_refusal_with_a_used_optimizer_is_a_budget_error(make: Callable[..., optim.Optimizer]) -> None:
    model = Model().train()
    optimizer = used(make, model)
    with pytest.raises(memopt.BudgetError, match="too small for this step"):
        memopt.optimize(model, 5e-5, example_inputs=(torch.randn(64, 32),), optimizer=optimizer)

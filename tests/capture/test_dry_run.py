"""The first run of a forward that breaks into regions, on its real values."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.dry_run import without_gradients
from memopt.training_state import undone

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": None}


class Branches(nn.Module):
    """Branches on a value that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        h = self.norm(self.first(x))
        h = h + 1 if h[0, 0] > 0 else h * 2
        return self.last(torch.dropout(h, 0.5, train=True)).pow(2).mean()


def test_a_forward_that_branches_on_a_value_is_planned_on_its_values() -> None:
    torch.manual_seed(0)
    plain, model, x = Branches().train(), Branches().train(), torch.randn(32, 16)
    model.load_state_dict(plain.state_dict())
    memopt.optimize(model, 1, example_inputs=(x,), **EXACT)
    assert model.steps == 0
    for seed in (1, 2):
        drawn = []
        for trained in (plain, model):
            torch.manual_seed(seed)
            trained(x).backward()
            drawn.append(torch.rand([]))
        assert torch.equal(*drawn), "the generator ends in another state"
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected)
    assert model.steps == plain.steps == 2


class Failing(Branches):
    """Raises an exception of its own where its input is zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.any():
            raise ZeroDivisionError("mine")
        return super().forward(x)


@pytest.mark.plans_always
@pytest.mark.parametrize("allow", [{"recompute"}, {"recompute", "plain"}])
def test_an_exception_of_the_models_own_comes_through(allow: set[str]) -> None:
    model = Failing().train()
    memopt.optimize(model, 1, **{**EXACT, "allow": allow})
    with pytest.raises(ZeroDivisionError, match="mine"):
        model(torch.zeros(8, 16))
    model(torch.ones(8, 16)).backward()
    assert memopt.plan_of(model).regions


def test_everything_that_a_forward_changes_is_undone_also_where_it_raises() -> None:
    model = Branches().train()
    model.first.weight.grad = held = torch.ones(16, 16)
    mean, state, python = model.norm.running_mean.clone(), torch.get_rng_state(), random.getstate()  # type: ignore[union-attr]
    try:
        with undone(model), without_gradients(model):
            assert model.first.weight.grad is None
            model(torch.randn(8, 16)).backward()
            random.random()
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert model.first.weight.grad is held
    assert torch.equal(model.norm.running_mean, mean)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert model.steps == 0


def test_no_gradient_that_is_held_changes_and_no_hook_on_one_is_called() -> None:
    """Hooks on the nodes that accumulate gradients, as torch's `_apply_optimizer_in_backward` has them, are the
    user's: they belong to steps and not to captures."""
    model, x, called = Branches().train(), torch.randn(32, 16), []
    model.loose = nn.Parameter(torch.ones(16))  # type: ignore[assignment]
    node: Any = model.loose.view_as(model.loose).grad_fn.next_functions[0][0]  # type: ignore[union-attr, operator]
    node.register_hook(lambda *_: called.append(1))
    model.loose.grad = held = torch.ones(16)
    model.first.register_forward_hook(lambda module, given, result: _scaled(result, model.loose))
    memopt.optimize(model, 1, example_inputs=(x,), **EXACT)
    assert not called
    assert model.loose.grad is held
    assert torch.equal(held, torch.ones(16))


@torch._dynamo.disable
def _scaled(value: torch.Tensor, factor: Any) -> torch.Tensor:
    return value * factor

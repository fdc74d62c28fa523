"""A forward that runs a second time in its backward, of models whose code makes that hard."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.compat.operators import tree_leaves
from memopt.run.session import session_of

pytestmark = pytest.mark.filterwarnings("ignore:.*run a second time")


class Checkpointed(nn.Module):
    """With checkpoints of its own, in bfloat16 by autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU()) for _ in range(3))
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return self.last(x.float().exp())


class Product(torch.autograd.Function):
    """Keeps values in its context beside those that autograd knows to be saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.own = x.detach().clone()
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * (x + ctx.own) / 2).sum(0)


class WithOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(32)), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.weight)
        return self.last(y.exp())


class InPlace(nn.Module):
    """Writes to activations and to buffers, one of which its outputs depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 8)
        self.register_buffer("average", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.relu_()
        self.average.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        y = self.norm(y) + self.average
        return self.last(y.mul_(2).sin_())


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = F.dropout(self.first(x).tanh(), 0.3)
        return {"one": self.one(hidden), "others": [self.other(hidden.exp())]}


def squares(outputs: Any) -> Tensor:
    return torch.stack([one.square().sum() for one in tree_leaves(outputs)]).sum()


def all_at_once(outputs: list[Any]) -> None:
    squares(outputs).backward()


def last_one_first(outputs: list[Any]) -> None:
    for one in reversed(outputs):
        squares(one).backward()


def first_of_several(outputs: list[Any]) -> None:
    """A part of one forward's outputs only, and then all of another's."""
    squares(tree_leaves(outputs[0])[:1]).backward()
    squares(outputs[1]).backward()


def twice(outputs: list[Any]) -> None:
    loss = squares(outputs)
    loss.backward(retain_graph=True)
    loss.backward()


def step(model: nn.Module, backward: Callable[[list[Any]], None]) -> dict[str, Tensor]:
    """The outputs of three forwards, of which earlier ones have freed what they saved if the model is optimised, its
    gradients and its buffers."""
    generator, session = torch.Generator().manual_seed(1), session_of(model)
    torch.manual_seed(3)
    inputs, outputs = [torch.randn(64, 32, generator=generator) for _ in range(3)], list[Any]()
    for one in inputs:
        outputs.append(model(one))
        assert session is None or session.share.free_waiting()
    found = {f"output {number}": one.detach().clone() for number, one in enumerate(tree_leaves(outputs))}
    backward(outputs)
    found |= {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {**found, **dict(model.named_buffers()), "next random number": torch.rand(1)}


@pytest.mark.parametrize("kind", [Checkpointed, WithOwnFunction, InPlace, TwoOutputs])
@pytest.mark.parametrize("backward", [all_at_once, last_one_first, first_of_several, twice])
def test_it_computes_what_the_plain_model_does(kind: type[nn.Module], backward: Callable[[list[Any]], None]) -> None:
    torch.manual_seed(0)
    plain = kind()
    model = deepcopy(plain)
    memopt.optimize(model, 1.0, precision="fp32", allow={"recompute", "reinplace"})
    expected, ours = step(plain, backward), step(model, backward)
    assert ours.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, ours[name])] == []
    assert memopt.status(model).state is memopt.State.PLAIN

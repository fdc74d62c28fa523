"""Parameters that lead only to outputs which no backward reaches have no gradient, as in the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from tests.end_to_end.test_values_in_python import EXACT


class Pooled(nn.Module):
    """Returns two heads of one body; what follows in `forward` uses one of them, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
        self.first, self.second = nn.Linear(64, 8), nn.Linear(64, 8)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.first(hidden), self.second(hidden)


class Broken(Pooled):
    """Leaves one head out, behind a graph break."""

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        first, second = self.heads(x)
        torch._dynamo.graph_break()
        return (first + second if both else first).pow(2).mean()


class Chained(Pooled):
    """Leaves out what a second region computes from one head."""

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        first, second = self.heads(x)
        torch._dynamo.graph_break()
        first, second = first.sin() * 2, second.cos() * 2
        torch._dynamo.graph_break()
        return (first + second if both else first).pow(2).mean()


class Whole(Pooled):
    """Returns two losses."""

    def forward(self, x: torch.Tensor, both: bool) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.heads(x)
        return first.pow(2).mean(), second.pow(2).mean()


def loss_of(model: nn.Module, x: torch.Tensor, both: bool) -> torch.Tensor:
    result = model(x, both)
    if isinstance(result, torch.Tensor):
        return result
    return result[0] + result[1] if both else result[0]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)


@pytest.mark.plans_always
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Broken, Chained, Whole])
@pytest.mark.parametrize("accumulating", [False, True])
def test_what_no_backward_reaches_has_no_gradient(kind: Callable[[], Pooled], accumulating: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = kind()
    plain, x = copy.deepcopy(model), torch.randn(32, 64)
    options: dict[str, Any] = EXACT | {"backend": backend}
    memopt.optimize(model, 1.0, **options)
    optimizers = {one: sgd(one) for one in (model, plain)}
    for both in (False, False, True, False):
        for one, optimizer in optimizers.items():
            loss_of(one, x, both).backward()
            if accumulating:
                loss_of(one, x, both).backward()
            optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None and backend == "aten":
                assert torch.equal(ours.grad, theirs.grad), name
            torch.testing.assert_close(ours, theirs)
        for optimizer in optimizers.values():
            optimizer.zero_grad()

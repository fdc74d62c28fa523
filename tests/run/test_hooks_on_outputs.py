"""Forwards that break into regions and put hooks on what a region returned."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import memopt


class FixedPoint(nn.Module):
    """As a deep equilibrium model: the hook of one output of a region reads the graph of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.inner(x)
        z = self.step(u)
        start = z.detach().requires_grad_()
        again = self.step(start) + u

        def solved(gradient: torch.Tensor) -> torch.Tensor:
            return gradient + torch.autograd.grad(again, start, gradient, retain_graph=True)[0]

        z.register_hook(solved)
        return z.square().mean()


def test_a_refused_model_is_freed() -> None:
    model = FixedPoint()
    reference = weakref.ref(model)
    memopt.optimize(model, 1e-4, elsewhere_gb=0)
    with pytest.raises((memopt.BudgetError, memopt.CaptureError)):
        model(torch.randn(256, 64))
    del model
    gc.collect()
    assert reference() is None

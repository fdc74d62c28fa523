"""A step in float64: of a copy, with the random numbers of the plain step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.checks.reference import float64_step
from memopt.saved_values import generator_states, set_generators

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.dropout(self.linear(x)).float().pow(2).mean()
        return loss


def test_it_draws_what_the_plain_step_draws_and_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    model, x = Model().train(), torch.randn(4, 8)
    before = generator_states(CPU)
    loss = model(x)
    after = generator_states(CPU)
    loss.backward()  # type: ignore[no-untyped-call]
    set_generators(before, CPU)
    found = float64_step(model, ((x,), {}), None, before, after)
    assert not isinstance(found, str)
    exact, gradients = found
    assert exact == pytest.approx(float(loss.detach()), rel=1e-6)
    assert gradients["linear.weight"].dtype is torch.float64
    assert model.linear.weight.dtype is torch.float32
    assert model.linear.weight.grad is not None
    assert torch.allclose(gradients["linear.weight"].float(), model.linear.weight.grad, rtol=1e-5)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is torch.float32, "float32 only"
        return (x * self.weight).sum()


def test_a_model_that_does_not_run_in_float64_has_no_reference() -> None:
    states = generator_states(CPU)
    found = float64_step(Narrow(), ((torch.ones(3),), {}), None, states, states)
    assert isinstance(found, str)
    assert "does not run in float64" in found

"""Operator graphs of regions that passes cannot edit: those with graphs of their own, or under a transform."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt


class Swish(torch.autograd.Function):
    """x · sigmoid(x), with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * (gate + x * gate * (1 - gate))


class Own(nn.Module):
    """Runs a function with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Swish.apply(self.up(x))).pow(2).mean()  # type: ignore[no-untyped-call]


class Mapped(nn.Module):
    """Runs under `torch.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: torch.tanh(row @ self.weight))(x).pow(2).mean()


@pytest.mark.parametrize("make", [Own, Mapped])
def test_what_passes_cannot_edit_stays_as_it_is(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().train(), torch.randn(16, 32)
    expected = model(x)
    expected.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    memopt.optimize(model, 1, precision="bf16", optimizer=None)
    loss = model(x)
    loss.backward()
    said = any("is not rewritten by passes" in note for note in memopt.plan_of(model).notes)
    assert said == (make is Mapped)
    torch.testing.assert_close(loss.float(), expected, rtol=0.02, atol=0.0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert (parameter.grad - gradient).norm() < 0.05 * gradient.norm()


class Reversal(torch.autograd.Function):
    """Gradient reversal, as domain adaptation has it, with a factor that grows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * gradient, None


class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.domains = nn.Linear(32, 64), nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        hidden = self.body(x).relu()
        backwards = Reversal.apply(hidden, factor)  # type: ignore[no-untyped-call]
        return self.classes(hidden).square().mean() + self.domains(backwards).square().mean()


@pytest.mark.plans_always
@pytest.mark.parametrize("options", [{}, {"precision": "fp32"}])
def test_a_number_that_changes_and_is_given_to_a_function_with_its_own_gradient(options: dict[str, Any]) -> None:
    plain, planned = Domains(), memopt.optimize(Domains(), 1, optimizer=None, **options)
    for factor in (0.0, 0.2, 0.3):
        x = torch.randn(64, 32)
        for model in (plain, planned):
            model.zero_grad()
            model(x, factor).backward()
        for theirs, ours in zip(plain.parameters(), planned.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.05, atol=0.02)
    assert memopt.status(planned).state is memopt.State.PLANNED

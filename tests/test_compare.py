"""`memopt.compare`: what it finds, and that it leaves no trace."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.comparison import Comparison, Difference, Run

WIDTH = 64
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Has all that a step touches: dropout, a counted buffer, running statistics, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(self.norm(x), y)


class Body(nn.Sequential):
    """The same without its loss."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, WIDTH, generator=generator), torch.randn(256, WIDTH, generator=generator)


def tight(model: nn.Module, batch: Any, **options: Any) -> nn.Module:
    """The model, optimised for a budget just above the smallest."""
    plan = memopt.plan(model, 1, batch, precision="fp32", **options)
    return memopt.optimize(model, plan.smallest_gb() * 1.02, precision="fp32", **options)


def test_the_optimised_step_is_the_plain_one(batch: Batch) -> None:
    model = tight(Net(), batch)
    found = memopt.compare(model, batch)
    assert found.bitwise
    assert found.loss_error == 0
    assert memopt.plan_of(model).added_seconds > 0
    assert [each.name for each in found.gradients] == [name for name, _ in model.named_parameters()]
    assert [each.name for each in found.buffers] == [name for name, _ in model.named_buffers()]
    assert found.optimized.peak_bytes < found.plain.peak_bytes
    assert found.plain.seconds > 0


def test_a_batch_by_keywords_and_one_with_a_loss_function(batch: Batch) -> None:
    x, y = batch
    assert memopt.compare(tight(Net(), {"x": x, "y": y}), {"x": x, "y": y}).bitwise
    with_loss = tight(Body(), batch, loss_fn=nn.functional.mse_loss)
    found = memopt.compare(with_loss, batch)
    assert found.bitwise
    assert len(found.gradients) == 4


def fingerprint(model: nn.Module) -> list[bytes]:
    state = [value.numpy().tobytes() for value in model.state_dict().values()]
    return [
        *state,
        torch.get_rng_state().numpy().tobytes(),
        repr(np.random.get_state()).encode(),
        repr(random.getstate()).encode(),
    ]


def fails_in_plain_step(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("in the middle")

    call: Any = model._compiled_call_impl
    monkeypatch.setattr(call.forward, "plain", fail)


@pytest.mark.parametrize("spoil", [None, fails_in_plain_step])
def test_nothing_is_left_behind(
    batch: Batch, spoil: Callable[..., None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tight(Net(), batch)
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    gradients.pop("norm.bias")
    for name, gradient in gradients.items():
        model.get_parameter(name).grad = gradient
    buffers = dict(model.named_buffers())
    before = fingerprint(model)
    if spoil is not None:
        spoil(model, monkeypatch)
        with pytest.raises(ArithmeticError, match="in the middle"):
            memopt.compare(model, batch)
    else:
        assert memopt.compare(model, batch).bitwise
    assert fingerprint(model) == before
    assert dict(model.named_buffers()).keys() == buffers.keys()
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(parameter.grad is gradients.get(name) for name, parameter in model.named_parameters())
    assert all(bool((gradient == 1).all()) for gradient in gradients.values())


def test_what_is_kept_aside_does_not_count(batch: Batch) -> None:
    model = tight(Net(), batch)
    alone = memopt.compare(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    beside = memopt.compare(model, batch)
    assert beside.plain.peak_bytes == pytest.approx(alone.plain.peak_bytes, abs=4096)
    assert beside.optimized.peak_bytes == pytest.approx(alone.optimized.peak_bytes, abs=4096)


def test_what_cannot_be_compared(batch: Batch) -> None:
    with pytest.raises(ValueError, match=r"this Net is not optimised; call memopt\.optimize first"):
        memopt.compare(Net(), batch)
    model = memopt.optimize(Net(), 1, precision="fp32")
    with pytest.raises(ValueError, match=r"in eval mode.*call model.train\(\) first"):
        memopt.compare(model.eval(), batch)
    handle = model.train().get_parameter("norm.bias").register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"hook acts on the accumulated gradient of norm\.bias"):
        memopt.compare(model, batch)
    handle.remove()
    with pytest.raises(TypeError, match="must be a tuple"):
        memopt.compare(model, 3)
    with pytest.raises(ValueError, match="the loss must be a scalar, but its shape is"):
        memopt.compare(memopt.optimize(Body(), 1, outputs="all", precision="fp32"), batch[:1])


def test_a_budget_too_small_passes_through(batch: Batch) -> None:
    model = memopt.optimize(Net(), 1e-4, precision="fp32")
    before = fingerprint(model)
    with pytest.raises(memopt.BudgetError, match="too small"):
        memopt.compare(model, batch)
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("optimized", "plain", "absolute", "relative", "bitwise"),
    [
        (torch.ones(2), torch.ones(2), 0, 0, True),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), 0, 0, True),
        (torch.tensor(0.0), torch.tensor(-0.0), 0, 0, False),
        (torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0]), 0.5, 0.125, False),
        (torch.tensor([1, 2]), torch.tensor([1, 4]), 2, 0.5, False),
        (torch.tensor([1j]), torch.tensor([2j]), 1, 0.5, False),
        (torch.tensor([math.nan]), torch.ones(1), math.inf, math.inf, False),
        (torch.ones(1), torch.zeros(1), 1, math.inf, False),
        (None, torch.ones(1), math.inf, math.inf, False),
    ],
)
def test_a_difference(
    optimized: Tensor | None, plain: Tensor | None, absolute: float, relative: float, bitwise: bool
) -> None:
    assert Difference.of("w", optimized, plain) == Difference("w", absolute, relative, bitwise)


def test_the_table_names_the_worst() -> None:
    run = Run(loss=2.5, peak_bytes=3 * 1024**2, seconds=0.25)
    off = Difference("layers.3.weight", 1e-6, 2e-5, False)
    found = Comparison(run, Run(2.75, 2 * 1024**2, 0.3), (Difference("w", 0, 0, True), off), (), 2 * 1024**2)
    assert not found.bitwise
    assert found.loss_error == 0.25
    assert found.worst == off
    assert "of 2 gradients and 0 buffers 1 differ, the losses by 0.25" in str(found)
    assert "layers.3.weight" in found.table()
    assert "150.0%" in found.table()
    assert "bitwise equal: the loss, 0 gradients and 0 buffers" in str(Comparison(run, run, (), (), 2 * 1024**2))

"""Calls in eval mode whose inputs require gradients, as for adversarial examples, are training calls."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.errors import GIB
from tests.elsewhere import counted

__all__ = ["counted"]

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
ROWS, WIDTH, BLOCKS = 512, 96, 5


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def attacked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two steps of projected gradient descent in eval mode, as TRADES takes them."""
    model.eval()
    moved = x + 1e-3
    for _ in range(2):
        moved.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        moved = (moved + 1e-2 * gradient.sign()).detach()
    model.train()
    return moved


def train(share: float = 0, most: float = 0) -> tuple[list[int], list[float], nn.Module]:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if share:
        memopt.optimize(model, share * most / GIB, optimizer=optimizer, **EXACT)
    peaks, losses = [], []
    for _ in range(3):
        with memopt.measure_peak() as peak:
            x, y = torch.randn(2 * ROWS, WIDTH), torch.randint(10, (2 * ROWS,))
            moved = attacked(model, x, y)
            loss = F.cross_entropy(model(moved[:ROWS]), y[:ROWS])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        peaks.append(peak.bytes)
        losses.append(loss.item())
        del x, y, moved, loss
    return peaks, losses, model


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_adversarial_examples_are_made_within_the_budget() -> None:
    peaks, losses, _ = train()
    gc.collect()
    share = 0.8
    own_peaks, own_losses, _ = train(share, max(peaks))
    assert max(own_peaks) <= share * max(peaks)
    assert own_losses == losses


def test_a_call_in_eval_mode_that_is_refused_runs_plain() -> None:
    model = memopt.optimize(classifier().eval(), 1e-4, **EXACT, elsewhere_gb=0)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.warns(UserWarning, match=r"calls of Sequential in eval\(\) mode run plain: a budget") as warned:
        outputs = [model(x) for _ in range(2)]
    assert len(warned) == 1
    expected = classifier().eval()(x)
    assert all(torch.equal(one, expected) for one in outputs)
    model.train()
    with pytest.raises(memopt.BudgetError):
        model(x)


def test_evaluation_without_an_input_that_requires_a_gradient_is_not_planned() -> None:
    model = memopt.optimize(classifier().eval(), 1e-4, **EXACT, elsewhere_gb=0)
    model(torch.randn(ROWS, WIDTH))
    assert memopt.status(model).state is memopt.State.NEW

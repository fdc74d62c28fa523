"""Budgets that refusals name in the middle of a training: they serve all that came before, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt

EXACT: dict[str, Any] = {
    "precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": torch.optim.SGD, "elsewhere_gb": 0.0
}  # fmt: skip


class Tasks(nn.Module):
    """A backbone with two heads; each call has labels for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)) for _ in range(3)]
        self.backbone = nn.Sequential(*(layer for some in layers for layer in some))
        self.small, self.large = nn.Linear(64, 4), nn.Linear(64, 512)

    def forward(self, x: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
        h = self.backbone(x)
        losses = [(getattr(self, name)(h) - label).square().mean() for name, label in labels.items()]
        return torch.stack(losses).sum()


def train(budget_gb: float) -> int:
    """Train with the backbone frozen at first, for several kinds of labels; returns the steps that were done."""
    model = Tasks().train()
    memopt.optimize(model, budget_gb, **EXACT)
    few, many = {"small": torch.rand(512, 4)}, {"small": torch.rand(512, 4), "large": torch.rand(512, 512)}
    model.backbone.requires_grad_(False)
    done = 0
    try:
        for labels in (few, many, few, many):
            model.backbone.requires_grad_(done > 1)
            model(torch.rand(512, 64), labels).backward()
            model.zero_grad()
            done += 1
    except memopt.BudgetError as refused:
        refused.done = done  # type: ignore[attr-defined]
        raise
    return done


def test_a_budget_named_in_mid_run_serves_calls_with_other_arguments_that_came_before() -> None:
    model, few = Tasks().train(), {"small": torch.rand(512, 4)}
    with pytest.raises(memopt.BudgetError) as for_few:
        memopt.optimize(model, 1e-4, **EXACT)(torch.rand(512, 64), few)
    with pytest.raises(memopt.BudgetError, match="calls with other arguments") as refused:
        train(0.97 * for_few.value.smallest_gb)
    assert refused.value.done == 2  # type: ignore[attr-defined]
    assert train(refused.value.smallest_gb) == 4


class Layers(nn.Module):
    """Layers whose outputs are small and whose activations are many."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(6)]
        self.body = nn.Sequential(*(layer for some in layers for layer in some))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def train_twice(budget_gb: float | None) -> int:
    """Train with two forwards before each backward; returns the peak in bytes."""
    model, most = Layers().train(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget_gb is not None:
        exact = {"precision": "fp32", "allow": {"recompute", "reinplace"}}
        memopt.optimize(model, budget_gb, optimizer=optimizer, **exact)
    for _ in range(3):
        first, second = torch.rand(512, 64), torch.rand(576, 64)
        with memopt.measure_peak("cpu") as peak:
            one, two = model(first), model(second)
            loss = one.square().mean() + (two.mean(0) - one.mean(0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            del one, two, loss
        most = max(most, peak.bytes)
    return most


def test_a_budget_named_for_two_forwards_has_no_room_for_what_the_first_can_free() -> None:
    plain_gb = train_twice(None) / 2**30
    for share in (0.42, 0.4, 0.38, 0.36, 0.34):
        try:
            train_twice(share * plain_gb)
        except memopt.BudgetError as refused:
            named = refused.smallest_gb
            break
    assert named < 0.6 * plain_gb
    train_twice(named)

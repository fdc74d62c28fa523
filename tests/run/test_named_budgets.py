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

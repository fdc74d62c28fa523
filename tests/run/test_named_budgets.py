"""Budgets that refusals name in the middle of a training: they serve all that came before, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt


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
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, optimizer=torch.optim.SGD)
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
    frozen = Tasks().train()
    frozen.backbone.requires_grad_(False)
    with memopt.measure_peak("cpu") as peak:
        frozen(torch.rand(512, 64), {"small": torch.rand(512, 4), "large": torch.rand(512, 512)}).backward()
    with pytest.raises(memopt.BudgetError, match="calls with other arguments") as refused:
        train(1.02 * peak.bytes / 2**30)
    assert refused.value.done == 2  # type: ignore[attr-defined]
    assert train(refused.value.smallest_gb) == 4

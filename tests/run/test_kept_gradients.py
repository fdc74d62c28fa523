"""Gradients that a loop keeps from several backwards through one forward, as PCGrad does, count beside the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.run.session import session_of
from tests.elsewhere import counted

__all__ = ["counted"]
pytestmark = pytest.mark.usefixtures("counted")
EXACT = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Tasks(nn.Module):
    """A trunk whose parameters weigh more than its activations, and three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
        self.heads = nn.ModuleList(nn.Linear(256, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x).square().mean() for head in self.heads]


def steps(budget_gb: float, times: int = 3) -> tuple[Tasks, list[int]]:
    """Train for some steps; returns the model and the peak of each step in bytes."""
    torch.manual_seed(0)
    model, peaks = Tasks(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    memopt.optimize(model, budget_gb, optimizer=optimizer, **EXACT)
    for _ in range(times):
        with memopt.measure_peak("cpu") as peak:
            losses, kept = model(torch.randn(256, 256)), []
            for number, loss in enumerate(losses):
                given = torch.autograd.grad(loss, model.parameters(), retain_graph=number < 2, allow_unused=True)
                kept.append(given)
            for parameter, *found in zip(model.parameters(), *kept, strict=True):
                parameter.grad = sum((one for one in found if one is not None), torch.zeros_like(parameter))
            optimizer.step()
            del losses, loss, kept, given, found
        peaks.append(peak.bytes)
    return model, peaks


@pytest.mark.slow
def test_kept_gradients_do_not_exceed_the_budget_of_a_plain_step() -> None:
    _, plain = steps(1)
    budget = max(plain) / 2**30 * 0.95
    for _ in range(4):
        try:
            _, peaks = steps(budget)
            break
        except memopt.BudgetError as refused:
            budget = refused.smallest_gb * 1.0001
    assert max(peaks) <= budget * 2**30


@pytest.mark.slow
@pytest.mark.plans_always
def test_plans_leave_room_for_kept_gradients() -> None:
    model, _ = steps(1)
    entry = session_of(model).share.entry  # type: ignore[union-attr]
    assert entry.seen_until_backward == 3
    assert entry.later_bytes >= 2 * sum(one.nbytes for one in model.trunk.parameters())

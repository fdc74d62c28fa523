"""Outputs that the caller keeps through the next forward, as `out = model(batch)` in a loop does, are in the budget
where the step's peak is in the forward: a plan has its own outputs only from there on where they are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import GIB, round_up
from tests.elsewhere import counted

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("counted")
ROWS = 1024


class First(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class PeakInForward(nn.Module):
    """A model whose forward has larger values for a moment than its backward. It may break once, or in a loop, behind
    which no code is captured: then what it returns is no output of a region."""

    def __init__(self, *, breaks: str = "") -> None:
        super().__init__()
        self.breaks, self.wide = breaks, 3 if breaks == "in a loop" else 1
        self.first, self.last = First(256, 256), nn.Linear(256, 256 * self.wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.breaks == "once":
            torch._dynamo.graph_break()
        for _ in range(2 if self.breaks == "in a loop" else 0):
            torch._dynamo.graph_break()
        with torch.no_grad():
            largest = (h.repeat(4 * self.wide, 1) ** 2).sum(1).max()
        return nn.functional.linear(h, self.last.weight, self.last.bias) + 0 * largest


def peaks(budget_gb: float | None, *, breaks: str = "", count: int = 4) -> list[int]:
    """The peaks of steps of a loop that has a name for each step's output."""
    torch.manual_seed(0)
    model = PeakInForward(breaks=breaks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if budget_gb is not None:
        options: Any = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "optimizer": optimizer}
        memopt.optimize(model, budget_gb, **options)
    found = []
    for _ in range(count):
        with memopt.measure_peak() as peak:
            optimizer.zero_grad()
            out = model(torch.randn(ROWS, 256))
            loss = out.clamp(-1, 1).abs().mean()
            loss.backward()
            optimizer.step()
        found.append(peak.bytes)
    return found


def named_gb(budget_gb: float, *, breaks: str) -> float:
    with pytest.raises(memopt.BudgetError) as refused:
        peaks(budget_gb, breaks=breaks)
    return float(round_up(refused.value.smallest_gb))


@pytest.mark.slow
@pytest.mark.parametrize("breaks", ["", "once", "in a loop"])
def test_the_named_budget_has_room_for_the_outputs_of_the_step_before(breaks: str) -> None:
    budget_gb = named_gb(0.004, breaks=breaks)
    assert max(peaks(budget_gb, breaks=breaks)) <= budget_gb * GIB
    assert budget_gb * GIB <= 1.05 * max(peaks(None, breaks=breaks))


@pytest.mark.slow
def test_a_plain_step_fits_with_the_outputs_of_the_step_before() -> None:
    plain = peaks(None)
    assert plain[1] > plain[0]
    budget_gb = (plain[0] + plain[1]) / 2 / GIB
    assert max(peaks(budget_gb)) <= budget_gb * GIB


@pytest.mark.slow
def test_a_named_budget_has_room_for_what_a_loss_keeps_where_outputs_are_dropped() -> None:
    """The value of `mse_loss` has memory of its operands' size, which stays as long as the loop has a name for it."""

    def losses(budget_gb: float) -> list[float]:
        torch.manual_seed(0)
        convolutions = nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
        model = nn.Sequential(*convolutions, nn.Conv2d(64, 9, 3, padding=1), nn.PixelShuffle(3))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, optimizer=optimizer)
        found = []
        for _ in range(4):
            x, y = torch.randn(16, 1, 24, 24), torch.randn(16, 1, 72, 72)
            with memopt.measure_peak() as peak:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            assert peak.bytes <= budget_gb * GIB
            found.append(float(loss))
        return found

    def named() -> float:
        with pytest.raises(memopt.BudgetError) as refused:
            losses(0.004)
        return float(round_up(refused.value.smallest_gb))

    assert len(losses(named())) == 4

"""A backward that is refused leaves nothing in memory: the budget that it names has the room at the next try."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import memopt
from tests.elsewhere import counted  # noqa: F401


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Tanh(), nn.Linear(128, 128))]
        self.body = nn.Sequential(nn.Linear(64, 128), *layers)
        self.heads = nn.ModuleList(nn.Linear(128, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.body(x)
        return [head(hidden) for head in self.heads]


def refused(budget_gb: float) -> weakref.ref[nn.Module]:
    model = TwoHeads()
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute", "reinplace"}, elsewhere_gb=0)
    losses = torch.stack([one.square().mean() for one in model(torch.randn(800, 64))])
    assert memopt.status(model).state is memopt.State.PLAIN
    try:
        losses.sum().backward(retain_graph=True)
    except memopt.BudgetError:
        return weakref.ref(model)
    raise AssertionError("the kept graph fits")


def test_what_autograd_was_about_to_run_is_freed() -> None:
    model = refused(4.0e-3)
    gc.collect()
    assert model() is None


def steps_until_refused(budget_gb: float) -> int:
    """The number of steps before one is refused that differentiates its forward twice; 4 where none is."""
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters())
    memopt.optimize(model, budget_gb, precision="fp32", allow={"recompute"}, optimizer=optimizer)
    for step in range(4):
        first, second = (one.square().mean() for one in model(torch.randn(800, 64)))
        try:
            first.backward(retain_graph=True)
        except memopt.BudgetError:
            return step
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        del first, second
    return 4


@pytest.mark.plans_always
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("budget_gb", [3.9e-3, 4.0e-3, 4.1e-3])
def test_a_kept_graph_that_later_steps_have_no_room_for_is_refused_in_the_first_step(budget_gb: float) -> None:
    assert steps_until_refused(budget_gb) in (0, 4)

"""Steps of many sizes settle on a few plans: each is made once, and for the largest sizes seen where it can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.planning.plan_search import PlanSearch
from memopt.run.session import session_of
from tests.elsewhere import counted

__all__ = ["counted"]
pytestmark = [pytest.mark.plans_always, pytest.mark.usefixtures("counted")]

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}}


class Model(nn.Module):
    """Layers over rows that are summed into so many graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(32, 32), nn.GELU())))

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        return x.new_zeros(graphs, 32).index_add(0, graph, self.layers(x)).square().mean()


@pytest.mark.slow
def test_sizes_that_no_margin_fits_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each larger batch was tried with a margin, and refused with advice that nobody read; the last batch of an epoch,
    of another number of graphs, made a plan for its own few rows, after which every other one was planned again."""
    refused = []
    advised = PlanSearch._with_proposals

    def counting(search: PlanSearch) -> Any:
        refused.append(search)
        return advised(search)

    monkeypatch.setattr(PlanSearch, "_with_proposals", counting)
    torch.manual_seed(0)
    model = Model()
    sizes = [(2000, 8), (2080, 8), (2160, 8), (2080, 8), (400, 4), (2000, 8), (2080, 8), (2160, 8), (400, 4)]
    calls = [(torch.randn(rows, 32), torch.arange(rows) % graphs, graphs) for rows, graphs in sizes]
    budget = memopt.plan(model, 1, calls[2], elsewhere_gb=0, **EXACT).smallest_gb() * 1.02
    memopt.optimize(model, budget, elsewhere_gb=0, **EXACT)
    session = session_of(model)
    assert session is not None
    plans = []
    for call in calls:
        model(*call).backward()
        model.zero_grad()
        plans.append(session.forward.road.plans)
    assert plans[-4:] == [plans[5]] * 4, plans
    assert len(refused) <= 2

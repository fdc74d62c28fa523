"""The joint graphs of regions are traced once for each rewriting."""

from __future__ import annotations

import torch
from torch import nn

import memopt


def test_a_broken_forward_is_planned_with_levers_whose_options_have_no_hash() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return self.last(h).pow(2).mean()

    model = Broken().train()
    memopt.optimize(model, 1, allow={"recompute", "fp8"}, precision="bf16", optimizer=None)
    model(torch.randn(64, 64)).backward()
    assert len(memopt.plan_of(model).regions) == 2

"""A model whose rows go to experts by numbers that Python reads, behind a graph break."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Expert(nn.Module):
    """A small network, one region by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Routed(nn.Module):
    """Sends the first rows to one expert, the next ones to another, and so on; experts without rows do not run."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.rows: Sequence[int] = ()

    @torch._dynamo.disable(recursive=False)
    def spread(self, x: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, [*self.rows])
        return torch.cat([
            expert(part) for expert, part in zip(self.experts, parts, strict=True) if len(part)
        ])  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.spread(torch.tanh(self.first(x))).pow(2).mean()

"""What `memopt.compare` restores: its runs begin alike, and leave model and batch as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt

pytestmark = pytest.mark.plans_always


class Momentum(nn.Module):
    """A momentum encoder, which the forward moves, and a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.key[0].weight.data.mul_(0.5)
        self.register_buffer("queue", torch.randn(16, 128))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.mul_(0.5).add_(theirs, alpha=0.5)
            keys = self.key(x)
        loss = F.cross_entropy(self.query(x) @ torch.cat([keys.T, self.queue], 1), torch.arange(len(x)))
        self.queue[:, : len(x)] = keys.T
        return loss


class Convolution(nn.Module):
    """Keeps its result in the attributes of its batch, as those for torch_geometric may."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, data: Any) -> Tensor:
        data.x = self.embed(data.x).relu()
        data.store.x = torch.zeros_like(data.x).index_add(0, data.edges[1], data.x[data.edges[0]]) + data.store.x
        return self.head(data.store.x).square().mean()


class Store:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.of: Data | None = None


class Data:
    def __init__(self, x: Tensor) -> None:
        self.x, self.edges, self.store = x, torch.randint(len(x), (2, 90)), Store(x)
        self.store.of = self  # as torch_geometric's storages know the batch that they belong to


def test_parameters_that_the_forward_writes() -> None:
    model = memopt.optimize(Momentum(), 1, optimizer=None, precision="fp32", allow={"recompute"})
    before = copy.deepcopy(model.state_dict())
    result = memopt.compare(model, torch.randn(24, 32), reference="fp32")
    assert result.bitwise
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_attributes_of_the_batch() -> None:
    model = memopt.optimize(Convolution(), 1, optimizer=None, precision="fp32", allow={"recompute"})
    x = torch.randn(40, 16)
    data = Data(x)
    result = memopt.compare(model, (data,), reference="fp32")
    assert result.bitwise
    assert data.x is x
    assert data.store.x is x


class Wide(nn.Module):
    """Parameters that are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def test_copies_of_parameters_are_no_part_of_the_steps() -> None:
    model = Wide().train()
    memopt.optimize(model, 1, precision="fp32", allow={"recompute", "reinplace"}, optimizer=None)
    found = memopt.compare(model, (torch.randn(4, 1024),), reference="fp32")
    step = 2.2 * sum(one.nbytes for one in model.parameters())  # with gradients
    assert max(found.plain.peak_gb, found.optimized.peak_gb) * 2**30 < step

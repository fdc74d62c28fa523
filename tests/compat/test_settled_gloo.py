"""Exchanges by gloo of FSDP2 models that memopt plans: the same numbers as without it, and peaks that do not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memopt
from memopt.compat.exchanges import settle_gloo, unsettle_gloo
from memopt.compat.fsdp import groups_of
from memopt.compat.tensors import shard_of
from tests.two_ranks import on_ranks

pytestmark = pytest.mark.slow  # starts processes
STEPS = 4


def sharded(ranks: int) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: Any, rank: int) -> tuple[list[torch.Tensor], set[int]]:
    """The gradients of the last step, and the peaks of all but the first."""
    peaks = set[int]()
    for step in range(STEPS):
        model.zero_grad()
        given = torch.ones(4, 512) * (rank + 1)
        with memopt.measure_peak("cpu") as peak:
            model(given).square().mean().backward()
        if step:
            peaks.add(peak.bytes)
    return [shard_of(value.grad).clone() for value in model.parameters()], peaks


def facts(rank: int, ranks: int) -> dict[str, Any]:
    model, other = sharded(ranks), sharded(ranks)
    own = groups_of(model[0])[0]._all_gather_comm
    settle_gloo(model)
    settle_gloo(model)  # has nothing left to do
    found = {"replaced": groups_of(model[0])[0]._all_gather_comm is not own}
    gradients, found["peaks"] = trained(model, rank)
    expected, _ = trained(other, rank)
    found["same"] = all(map(torch.equal, gradients, expected))
    unsettle_gloo(model)
    found["left"] = groups_of(model[0])[0]._all_gather_comm is own
    other[0].set_custom_all_gather(mine := _Mine(own))
    settle_gloo(other)
    found["the user's own stays"] = groups_of(other[0])[0]._all_gather_comm is mine
    return found


class _Mine:
    """A user's own exchange."""

    def __init__(self, usual: Any) -> None:
        self.allocate, self.usual = usual.allocate, usual

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.usual(*args, **kwargs)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_settle(ranks: int) -> None:
    for found in on_ranks(ranks, facts, ranks):
        assert len(found.pop("peaks")) == 1
        assert all(found.values()), found

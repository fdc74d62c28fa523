"""Parts of FSDP2 on two ranks: what is gathered, and a forward and backward that asks no other rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from examples.models.settled_gloo import settled
from memopt.compat.fsdp import Gathered, exchange_in_words, sharding_in_words
from memopt.compat.tensors import shard_of
from tests.two_ranks import on_two_ranks

pytestmark = pytest.mark.slow  # starts two processes


def sharded() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(4, 64)).square().mean().backward()
    return [shard_of(value.grad).clone() for value in model.parameters() if value.grad is not None]


def facts(rank: int) -> dict[str, Any]:
    model, other, quiet = sharded(), sharded(), sharded()
    found: dict[str, Any] = {"words": exchange_in_words(model), "sharding": sharding_in_words(model)}
    expected = step(other)
    settled(quiet)
    found["same when settled"] = all(map(torch.equal, step(quiet), expected))
    if rank == 0:  # alone: rank 1 does not take part
        with Gathered(model).without_exchange():
            step(model)
        found["left"] = [value.grad for value in model.parameters()]
    found["same after it"] = all(map(torch.equal, step(model), expected))
    held = step(model)  # twice as much
    if rank == 0:
        with Gathered(model).without_exchange():
            step(model)
    now = [shard_of(value.grad) for value in model.parameters()]
    found["set aside"] = all(map(torch.equal, now, held))
    found["freed"] = [tensor.untyped_storage().nbytes() for tensor in Gathered(model).memory()]
    return found


def test_facts_of_a_sharded_model() -> None:
    first, second = on_two_ranks(facts)
    assert first["left"] == [None] * 6
    assert first["words"] == second["words"] != ""
    assert first["sharding"] == second["sharding"]
    for found in (first, second):
        assert found["same when settled"]
        assert found["same after it"]
        assert found["set aside"]
        assert found["freed"] == [0] * 6


def test_a_plain_model_gathers_nothing() -> None:
    model = nn.Linear(4, 4)
    assert not Gathered(model)
    assert list(Gathered(model).memory()) == []
    assert model.weight not in Gathered(model)
    assert exchange_in_words(model) == ""

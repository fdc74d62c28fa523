"""The state of an optimiser whose parameters are spread over ranks, counted again once it is there."""

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from memopt.account.optimizer_account import optimizer_account


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one rank, this process."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def test_a_step_with_sharded_state_is_counted(alone: None) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = list(model.parameters())
    before = optimizer_account(optimizer, parameters, "cpu")
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    after = optimizer_account(optimizer, parameters, "cpu")
    assert after.state_bytes == before.state_bytes > 2 * 64 * 32 * 2 * 4

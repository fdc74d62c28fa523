"""What one card of a cluster holds, against the shards that torch's own FSDP2 makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.account.sharded import Sharding
from memopt.compat.tensors import shard_of
from memopt.device.cluster import Cluster, check_cluster
from passes.graphs.node_facts import block_of
from tests.two_ranks import on_two_ranks

FAMILIES = ("GPT-2", "Llama", "ViT")


def cluster_of(cards: int) -> Cluster:
    found = check_cluster({"dp_shard": cards}, "nvlink4+ib-ndr")
    assert found is not None
    return found


def real_shards(rank: int, name: str) -> list[int]:
    """The bytes of the shards of a rank's parameters."""
    from examples.models.fully_shard import FAMILIES as MODELS

    model = MODELS[name].sharded(2, checkpointed=False)
    return [shard_of(parameter).nbytes for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_shards_are_those_that_fully_shard_makes(name: str) -> None:
    from examples.models.fully_shard import FAMILIES as MODELS

    model = MODELS[name].make()
    planned = Sharding.of(model, cluster_of(2), torch.bfloat16)
    first, _ = on_two_ranks(real_shards, name)
    assert [shard.nbytes for shard in planned.shards(model.parameters())] == first


def test_groups_are_the_blocks_and_the_rest() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 10))
    whole = nn.ModuleDict({"layers": model, "head": nn.Linear(10, 3)})
    found = Sharding.of(whole, cluster_of(8), torch.bfloat16)
    assert sorted(group.name for group in found.groups) == ["", "layers.0", "layers.1"]
    (first,) = (group for group in found.groups if group.name == "layers.0")
    # 6 rows are one for each of 8 cards, padded; so are the 6 numbers of the bias.
    assert first.gathered_bytes == 2 * (8 * 8 + 8)
    assert first.reduced_bytes == 4 * (8 * 8 + 8)
    assert first.shard_bytes == 4 * (8 + 1)


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model.requires_grad_(False)
    (group,) = Sharding.of(model, cluster_of(8), torch.bfloat16).groups
    assert (group.gathered_bytes, group.reduced_bytes, group.shard_bytes) == (2 * 64, 0, 0)


@pytest.mark.parametrize(
    ("path", "block"),
    [("model.layers.3.mlp.up.weight", "model.layers.3"), ("h.0", "h.0"), ("head.weight", ""), ("experts", "")],
)
def test_blocks_are_the_outermost_elements_of_lists(path: str, block: str) -> None:
    assert block_of(path) == block

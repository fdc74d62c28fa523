"""Meshes and interconnects: what is refused, and the time of collectives."""

from __future__ import annotations

from typing import Any

import pytest

from memopt.device.cluster import BEGIN_SECONDS, BETWEEN_NODES, WITHIN_NODES, Cluster, check_cluster

NETWORK = "nvlink4+ib-ndr"
NBYTES = 512 * 1024**2


def cluster(interconnect: str = NETWORK, **mesh: int) -> Cluster:
    found = check_cluster(mesh, interconnect)
    assert found is not None
    return found


def test_neither_is_one_card() -> None:
    assert check_cluster(None, None) is None


def test_a_gather_in_a_node_takes_what_its_links_take() -> None:
    link = WITHIN_NODES["nvlink4"]
    moved = NBYTES * 7 / 8 / link.reached_bytes_per_second
    expected = BEGIN_SECONDS + 7 * link.step_seconds + moved
    assert cluster("nvlink4", dp_shard=8).dp_shard.gather_seconds(NBYTES) == pytest.approx(expected)


def test_a_gather_over_nodes_takes_what_the_slower_of_both_takes() -> None:
    network, link = BETWEEN_NODES["ib-ndr"], WITHIN_NODES["nvlink4"]
    received = NBYTES * 3 / 4 / (8 * network.reached_bytes_per_second)
    inside = NBYTES * 31 / 32 / link.reached_bytes_per_second
    steps = 28 * link.step_seconds + 3 * network.step_seconds
    expected = BEGIN_SECONDS + steps + max(received, inside)
    assert cluster(dp_shard=32).dp_shard.gather_seconds(NBYTES) == pytest.approx(expected)


def test_each_group_of_shards_has_one_adapter_of_a_node_whose_cards_are_split() -> None:
    """With eight neighbours in "tp", the cards of a "dp_shard" group lie in eight different nodes."""
    split = cluster(dp_shard=8, tp=8)
    assert split.tp.in_node == 8
    assert split.dp_shard.in_node == 1
    network = BETWEEN_NODES["ib-ndr"]
    expected = BEGIN_SECONDS + 7 * network.step_seconds + NBYTES * 7 / 8 / network.reached_bytes_per_second
    assert split.dp_shard.gather_seconds(NBYTES) == pytest.approx(expected)
    assert split.mesh.cards == 64


def test_one_card_exchanges_nothing() -> None:
    assert cluster(dp_shard=8).tp.gather_seconds(NBYTES) == 0.0
    assert cluster(dp_shard=8).dp_replicate.sum_seconds(NBYTES) == 0.0


@pytest.mark.parametrize(
    ("mesh", "interconnect", "kind", "text"),
    [
        ({"dp_shard": 8}, None, ValueError, "mesh needs interconnect too"),
        (None, NETWORK, ValueError, "interconnect needs mesh too"),
        ({"pp": 8}, NETWORK, ValueError, "unknown dimension 'pp' in mesh; known are dp_replicate, dp_shard, tp"),
        ({"dp_shard": 0}, NETWORK, ValueError, "'dp_shard' in mesh must be at least 1, not 0"),
        ({"dp_shard": 2.0}, NETWORK, TypeError, "'dp_shard' in mesh must be a whole number of cards, not 2.0"),
        ([8, 8], NETWORK, TypeError, "mesh must map names of dimensions to numbers"),
        ({"dp_shard": 1}, NETWORK, ValueError, "mesh has one card"),
        ({"dp_shard": 8}, "nvlink9", ValueError, "unknown interconnect 'nvlink9' within a node"),
        ({"dp_shard": 16}, "nvlink4+ethernet", ValueError, "unknown interconnect 'ethernet' between nodes"),
        ({"dp_shard": 8}, 4, TypeError, "interconnect must be a name"),
        ({"dp_shard": 16}, "nvlink4", ValueError, "mesh has 16 cards, more than the 8 of a node: name the network"),
        ({"dp_shard": 8, "tp": 3}, NETWORK, ValueError, "up to 'tp' make groups of 3 cards, which neither divide"),
        ({"dp_shard": 12}, NETWORK, ValueError, "up to 'dp_shard' make groups of 12 cards, which neither divide"),
    ],
)
def test_what_a_cluster_cannot_be_is_refused(mesh: Any, interconnect: Any, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text) as refused:
        check_cluster(mesh, interconnect)
    assert "\n" not in str(refused.value)


def test_a_ring_that_fills_no_node_passes_through_the_network() -> None:
    """Three replicas of four cards each: two in one node of eight, one in another."""
    network = BETWEEN_NODES["ib-ndr"]
    received = NBYTES / 2 / (2 * network.reached_bytes_per_second)
    assert cluster(dp_shard=4, dp_replicate=3).dp_replicate.gather_seconds(NBYTES) > received

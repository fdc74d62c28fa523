"""A cluster that a step is planned for: the mesh of its cards, the rates of the links that join them (a table from
their makers' figures), and the time of their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from memopt.device.hardware import PCIE

CARDS_PER_NODE = 8
_MICRO = 1e-6


@dataclass(frozen=True)
class _LinkRate:
    """A kind of link, by the rates at which one card sends and receives at the same time."""

    bytes_per_second: float
    """The rate in one direction, as its maker states it."""
    step_seconds: float
    """The latency of one step of a ring through this link."""
    efficiency: float
    """The share of the rate that large collectives reach."""
    source: str

    @property
    def reached_bytes_per_second(self) -> float:
        """The rate that large collectives reach."""
        return self.bytes_per_second * self.efficiency


# Steps of a ring with the protocol "Simple", the one for large messages: NCCL's own model of its times, `hwLat` in its
# src/graph/tuning.cc.
_NVLINK_STEP, _PCIE_STEP, _NETWORK_STEP = 3.4 * _MICRO, 5.7 * _MICRO, 9.6 * _MICRO
BEGIN_SECONDS = 8.4 * _MICRO
"""Seconds that a collective takes beside the steps of its ring: `baseLat` of NCCL's model."""
# A bus bandwidth of 230 to 250 GB/s of 300 is reported for all-reduce on eight A100 with NVSwitch, and 350 to 390 of
# 450 on eight H100 without reductions in the switch: about 0.8. The shares on a network,
# less frames' overhead and what switches lose, and on a bus are assumptions.
_SWITCHED, _ON_NETWORK, _ON_BUS = 0.8, 0.85, 0.7


def _nvlink(total_gigabytes: float, card: str) -> _LinkRate:
    source = f"NVIDIA {card} datasheet: {total_gigabytes:,.0f} GB/s in both directions together, half in each"
    return _LinkRate(total_gigabytes / 2 * 1e9, _NVLINK_STEP, _SWITCHED, source)


def _network(gigabits: float, name: str) -> _LinkRate:
    source = f"{name}: {gigabits:.0f} Gb/s in each direction, one adapter for each card"
    return _LinkRate(gigabits / 8 * 1e9, _NETWORK_STEP, _ON_NETWORK, source)


def _pcie(generation: int) -> _LinkRate:
    source = f"PCIe {generation}.0, 16 lanes"
    return _LinkRate(PCIE[generation], _PCIE_STEP, _ON_BUS, source)


WITHIN_NODES = {
    "nvlink3": _nvlink(600, "A100"),
    "nvlink4": _nvlink(900, "H100"),
    "nvlink5": _nvlink(1800, "B200"),
    "pcie4": _pcie(4),
    "pcie5": _pcie(5),
}
BETWEEN_NODES = {
    "ib-hdr": _network(200, "InfiniBand HDR"),
    "ib-ndr": _network(400, "InfiniBand NDR"),
    "ib-xdr": _network(800, "InfiniBand XDR"),
    "roce-200": _network(200, "Ethernet with RoCE"),
    "roce-400": _network(400, "Ethernet with RoCE"),
}


@dataclass(frozen=True)
class _Interconnect:
    """How cards are joined: links within a node, and the network between nodes (None for a single node)."""

    name: str
    within: _LinkRate
    between: _LinkRate | None


def _interconnect_named(name: str) -> _Interconnect:
    """The interconnect of a name such as "nvlink4+ib-ndr", or "nvlink4" for a single node. Raises `TypeError` for a
    `name` that is no string, and `ValueError` for an unknown one."""
    if not isinstance(name, str):
        raise TypeError(f"interconnect must be a name such as 'nvlink4+ib-ndr', not {name!r}")
    within, plus, between = name.partition("+")
    kinds = [(within, "within a node", WITHIN_NODES)] + ([(between, "between nodes", BETWEEN_NODES)] if plus else [])
    for part, where, known in kinds:
        if part not in known:
            raise ValueError(f"unknown interconnect {part!r} {where} in {name!r}; known are {', '.join(known)}")
    return _Interconnect(name, WITHIN_NODES[within], BETWEEN_NODES[between] if plus else None)


@dataclass(frozen=True)
class _Mesh:
    """The sizes of a mesh of cards, named as torchtitan names its dimensions, the outermost first."""

    dp_replicate: int = 1
    """The number of groups of cards that each hold all of the model and average their gradients (HSDP)."""
    dp_shard: int = 1
    """The number of cards over which `fully_shard` spreads parameters, gradients and the optimizer's state."""
    tp: int = 1
    """The number of neighbouring cards that split heads, widths and sequences (tensor and sequence parallelism)."""

    @property
    def cards(self) -> int:
        """The number of cards in all."""
        return self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        sizes = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "1 card"


@dataclass(frozen=True)
class Ring:
    """A group of `cards` that exchange with each other, `in_node` of them in each node."""

    cards: int
    in_node: int
    interconnect: _Interconnect

    def gather_seconds(self, nbytes: int) -> float:
        """Seconds of an all-gather after which each card has `nbytes`, of which it held its share before, or of a
        reduce-scatter of `nbytes` on each card. What other nodes send passes through the network adapters of a node's
        cards, what a card receives through its links; the slower of these counts. The ring takes one step for each
        other card."""
        if self.cards == 1:
            return 0.0
        nodes = -(-self.cards // self.in_node)
        within, between = self.interconnect.within, self.interconnect.between
        moved = nbytes * (self.cards - 1) / self.cards / within.reached_bytes_per_second if self.in_node > 1 else 0.0
        steps = (self.cards - nodes) * within.step_seconds
        if nodes > 1:
            assert between is not None
            received = nbytes * (nodes - 1) / nodes / (self.in_node * between.reached_bytes_per_second)
            moved = max(moved, received)
            steps += (nodes - 1) * between.step_seconds
        return BEGIN_SECONDS + steps + moved

    def sum_seconds(self, nbytes: int) -> float:
        """Seconds of an all-reduce of `nbytes`: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(nbytes)


@dataclass(frozen=True)
class Cluster:
    """A mesh of equal cards and its interconnect. Nodes are filled with the cards of one `tp` group first, then with
    those of one `dp_shard` group."""

    mesh: _Mesh
    interconnect: _Interconnect

    @property
    def tp(self) -> Ring:
        """The ring of cards that split the layers of one copy of the model (tensor parallelism)."""
        return self._ring(self.mesh.tp, 1)

    @property
    def dp_shard(self) -> Ring:
        """The ring of cards over which parameters are sharded."""
        return self._ring(self.mesh.dp_shard, self.mesh.tp)

    @property
    def dp_replicate(self) -> Ring:
        """The ring of cards that hold the same shards."""
        return self._ring(self.mesh.dp_replicate, self.mesh.tp * self.mesh.dp_shard)

    def _ring(self, cards: int, stride: int) -> Ring:
        return Ring(cards, max(1, min(cards, CARDS_PER_NODE // stride)), self.interconnect)


def check_cluster(mesh: Mapping[str, int] | None, interconnect: str | None) -> Cluster | None:
    """The arguments `mesh` and `interconnect` as a `Cluster`; None where neither is given.

    Raises `TypeError` for values of other types, `ValueError` where only one is given, for unknown names, and for sizes
    that are below 1, make a mesh of one card, need a network that is not named, or do not fit the nodes."""
    if mesh is None and interconnect is None:
        return None
    if mesh is None or interconnect is None:
        there, missing = ("mesh", "interconnect") if interconnect is None else ("interconnect", "mesh")
        example = "'nvlink4+ib-ndr'" if missing == "interconnect" else "{'dp_shard': 64}"
        raise ValueError(f"{there} needs {missing} too: give {missing}, such as {missing}={example}")
    sizes, joined = _checked_mesh(mesh), _interconnect_named(interconnect)
    if sizes.cards > CARDS_PER_NODE and joined.between is None:
        raise ValueError(
            f"mesh has {sizes.cards} cards, more than the {CARDS_PER_NODE} of a node: name the network between nodes "
            f"in interconnect, such as '{interconnect}+ib-ndr'"
        )
    for name, inner in (("tp", sizes.tp), ("dp_shard", sizes.tp * sizes.dp_shard)):
        if inner % CARDS_PER_NODE and CARDS_PER_NODE % inner:
            raise ValueError(
                f"the sizes in mesh up to {name!r} make groups of {inner} cards, which neither divide the "
                f"{CARDS_PER_NODE} cards of a node nor fill whole nodes; give sizes that do"
            )
    return Cluster(sizes, joined)


def _checked_mesh(mesh: Mapping[str, int]) -> _Mesh:
    known = [field.name for field in fields(_Mesh)]
    if not isinstance(mesh, Mapping):
        raise TypeError(
            f"mesh must map names of dimensions to numbers of cards, such as {{'dp_shard': 64}}, not {mesh!r}"
        )
    for name, size in mesh.items():
        if name not in known:
            raise ValueError(f"unknown dimension {name!r} in mesh; known are {', '.join(known)}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name!r} in mesh must be a whole number of cards, not {size!r}")
        if size < 1:
            raise ValueError(f"{name!r} in mesh must be at least 1, not {size}")
    sizes = _Mesh(**mesh)
    if sizes.cards == 1:
        raise ValueError("mesh has one card; leave mesh and interconnect out to plan for a single card")
    return sizes

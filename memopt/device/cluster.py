"""A cluster that a step is planned for: the mesh of its cards, what joins them, and the time of their collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memopt.device.interconnect import BEGIN_SECONDS, Interconnect, interconnect_named


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh of cards, named as torchtitan names its dimensions, the outermost first."""

    dp_replicate: int = 1
    """Groups of cards that each hold all of the model and average their gradients (HSDP)."""
    dp_shard: int = 1
    """Cards over which `fully_shard` spreads parameters, gradients and the optimiser's state."""
    tp: int = 1
    """Cards that split heads, widths and sequences among them (tensor and sequence parallelism); neighbours."""

    @property
    def cards(self) -> int:
        """The number of cards."""
        return self.dp_replicate * self.dp_shard * self.tp

    def __str__(self) -> str:
        sizes = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " × ".join(f"{name} {size}" for name, size in sizes if size > 1) or "1 card"


@dataclass(frozen=True)
class Ring:
    """A group of cards that exchange with each other, of which each node holds `in_node`."""

    cards: int
    in_node: int
    interconnect: Interconnect

    def gather_seconds(self, nbytes: int) -> float:
        """Seconds to gather `nbytes` on each card, of which each card has its share; as long as to scatter the sum of
        `nbytes` that each card has.

        Every node receives what it has not through the adapters of its cards, every card what it has not through its
        own links, and a ring takes one step for each other card.
        """
        if self.cards == 1:
            return 0.0
        nodes = self.cards // self.in_node
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
        """Seconds to sum `nbytes` over all cards, on all cards (an all-reduce): a scatter and a gather."""
        return 2 * self.gather_seconds(nbytes)


@dataclass(frozen=True)
class Cluster:
    """A mesh of equal cards and what joins them. Neighbours in a node are those of `tp`, then those of `dp_shard`."""

    mesh: Mesh
    interconnect: Interconnect

    @property
    def tp(self) -> Ring:
        """The cards that split one copy of the layers."""
        return self._ring(self.mesh.tp, 1)

    @property
    def dp_shard(self) -> Ring:
        """The cards over which parameters are sharded."""
        return self._ring(self.mesh.dp_shard, self.mesh.tp)

    @property
    def dp_replicate(self) -> Ring:
        """The cards that hold the same shards."""
        return self._ring(self.mesh.dp_replicate, self.mesh.tp * self.mesh.dp_shard)

    def _ring(self, cards: int, stride: int) -> Ring:
        in_node = max(1, min(cards, self.interconnect.cards_per_node // stride))
        return Ring(cards, in_node, self.interconnect)


def check_cluster(mesh: Mapping[str, int] | None, interconnect: str | None) -> Cluster | None:
    """The arguments `mesh` and `interconnect` as a `Cluster`; None where neither is given.

    Raises `TypeError` or `ValueError` for what they cannot mean.
    """
    if mesh is None and interconnect is None:
        return None
    if mesh is None or interconnect is None:
        there, missing = ("mesh", "interconnect") if interconnect is None else ("interconnect", "mesh")
        example = "'nvlink4+ib-ndr'" if missing == "interconnect" else "{'dp_shard': 64}"
        raise ValueError(f"{there} needs {missing} beside it: give {missing}={example}, say")
    sizes, joined = _checked_mesh(mesh), interconnect_named(interconnect)
    per_node = joined.cards_per_node
    if sizes.cards > per_node and joined.between is None:
        raise ValueError(
            f"mesh has {sizes.cards} cards and a node {per_node}: name the network between nodes in interconnect, such "
            f"as '{interconnect}+ib-ndr'"
        )
    for name, inner in (("tp", sizes.tp), ("dp_shard", sizes.tp * sizes.dp_shard)):
        if inner % per_node and per_node % inner:
            raise ValueError(
                f"{inner} cards up to {name!r} in mesh do neither divide the {per_node} cards of a node nor fill whole "
                "nodes; give sizes that do"
            )
    return Cluster(sizes, joined)


def _checked_mesh(mesh: Mapping[str, int]) -> Mesh:
    known = [field.name for field in fields(Mesh)]
    if not isinstance(mesh, Mapping):
        raise TypeError(f"mesh must map names of dimensions to numbers of cards, {{'dp_shard': 64}} say, not {mesh!r}")
    for name, size in mesh.items():
        if name not in known:
            raise ValueError(f"unknown dimension {name!r} in mesh; known are {', '.join(known)}")
        _check_size(name, size)
    sizes = Mesh(**mesh)
    if sizes.cards == 1:
        raise ValueError("mesh has one card; leave mesh and interconnect out to plan for that")
    return sizes


def _check_size(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name!r} in mesh must be a whole number of cards, not {size!r}")
    if size < 1:
        raise ValueError(f"{name!r} in mesh must be at least 1, not {size}")

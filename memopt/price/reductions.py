"""Where the gradients of a group of parameters are reduced over the cards of a cluster, as FSDP2 does it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from memopt.device.storages import Storages


@dataclass(frozen=True)
class Reduction:
    """The gradients of one group of parameters, which are reduced together once all of them are made."""

    name: str
    """The name of its op."""
    positions: frozenset[int]
    """The positions of the gradients among all results of the joint graph."""
    buffer_bytes: int
    """Bytes that the reduction takes beside the gradients, beyond those of the account."""
    made_bytes: int
    """Bytes of one card's share of the result; 0 where it is added to gradients that are held already."""


@dataclass(frozen=True)
class PlacedReduction:
    """A reduction behind the node that makes the last of its gradients."""

    reduction: Reduction
    storages: frozenset[int]
    """The gradients' storages, numbered as in `Storages`."""


def place_reductions(
    reductions: Collection[Reduction], results: Sequence[Any], storages: Storages, backward: Sequence[fx.Node]
) -> dict[fx.Node, list[PlacedReduction]]:
    """For each node of `backward`, which is in program order, the reductions that run right behind it; reductions
    without gradients that the backward makes are left out."""
    if not reductions:
        return {}
    order = {node: number for number, node in enumerate(backward)}
    found: dict[fx.Node, list[PlacedReduction]] = {}
    for reduction in reductions:
        given = [results[position] for position in reduction.positions]
        own = {index for node in given if isinstance(node, fx.Node) for index in storages.of.get(node, ())}
        # A view of the gradient may come later than the node that makes its memory.
        nodes = [*given, *(storages.infos[index].maker for index in own)]
        last = max((node for node in nodes if node in order), key=order.__getitem__, default=None)
        if last is not None:
            found.setdefault(last, []).append(PlacedReduction(reduction, frozenset(own)))
    return found

"""The bytes of the memory that every node of a joint graph makes, by `passes.graphs.aliases`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from memopt.compat.symbols import upper_bound
from passes import FoundReuse
from passes.graphs.aliases import Aliases, find_aliases, results_of, viewed_argument

tensors_of = results_of


@dataclass(frozen=True)
class StorageInfo:
    """A block of memory: the node that makes it (a `placeholder` if it exists before the step), and its bytes."""

    name: str
    bytes: int
    maker: fx.Node


@dataclass(frozen=True)
class Storages:
    """The storages of a graph, with their bytes: see `Aliases`, whose blocks they are."""

    aliases: Aliases

    @cached_property
    def infos(self) -> tuple[StorageInfo, ...]:
        """The description of every storage, in the order of their indices."""
        blocks = self.aliases.blocks
        return tuple(StorageInfo(block.maker.name, storage_bytes(block.value), block.maker) for block in blocks)

    @property
    def of(self) -> dict[fx.Node, tuple[int, ...]]:
        """By node, the indices of the storages of the tensors that it returns."""
        return self.aliases.of

    @property
    def views(self) -> set[fx.Node]:
        return self.aliases.views

    @property
    def written_over(self) -> set[int]:
        """The storages that hold one value after another."""
        return self.aliases.written_over

    def read_by(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the storages that a node reads, through views, each once, in the order of its arguments."""
        return self.aliases.read_by(node)

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the storages that a node allocates."""
        return self.aliases.made_by(node)


def find_storages(
    graph: fx.Graph, fused: frozenset[fx.Node] = frozenset(), reuses: Iterable[FoundReuse] = ()
) -> Storages:
    """Returns the storages of a functional ATen graph; see `find_aliases`.

    Each is as large as the storage of the fake tensor that is made in it. The values of `fused` nodes are never held.
    The calls of `reuses` are written over an operand. A copy on the host (`memopt::copy_out`) holds nothing here.
    """
    return Storages(find_aliases(graph, fused, {reuse.name: reuse.operand for reuse in reuses}))


def is_view(node: fx.Node) -> bool:
    """Returns whether the node's result lies in the memory of one of its arguments."""
    return viewed_argument(node) is not None


def storage_bytes(value: torch.Tensor) -> int:
    """Returns the bytes of the memory behind a tensor, at most: sizes that depend on data count as the largest ones."""
    nbytes = value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else upper_bound(nbytes)

"""Which memory every node of a joint graph makes, and which it only looks at."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from memopt.compat.operators import OpOverload, schema_of
from memopt.compat.symbols import upper_bound
from passes import FoundReuse
from passes.ops.offload_ops import COPY_OUT

# Share their input's memory although their schema does not say so.
_SILENT_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
}


@dataclass(frozen=True)
class StorageInfo:
    """A block of memory: the node that makes it (a `placeholder` for what is there before the step) and its bytes."""

    name: str
    bytes: int
    maker: fx.Node


@dataclass
class Storages:
    """The storages of a graph. `of[node]` lists, for each tensor that the node yields, its storage's index."""

    infos: list[StorageInfo] = field(default_factory=list)
    of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)
    written_over: set[int] = field(default_factory=set)
    """The storages that hold one value after another."""

    def read_by(self, node: fx.Node) -> tuple[int, ...]:
        """Storages that `node` reads, through views, each once, in the order of its arguments."""
        return tuple(dict.fromkeys(index for arg in node.all_input_nodes for index in self.of.get(arg, ())))

    def made_by(self, node: fx.Node) -> tuple[int, ...]:
        """Storages that come to be when `node` runs."""
        return tuple(index for index in dict.fromkeys(self.of.get(node, ())) if self.infos[index].maker is node)


def find_storages(
    graph: fx.Graph, fused: frozenset[fx.Node] = frozenset(), reuses: Iterable[FoundReuse] = ()
) -> Storages:
    """Follow every tensor of a functional ATen graph to the memory that holds it.

    Views and aliases (by their schema) share the storage of what they view; every other tensor result is a storage of
    its own, as large as its fake tensor's, but for those of `reuses`, which are written over an operand. What is copied
    to the host (`memopt::copy_out`) holds nothing here. Those of `fused` nodes are never held: who reads one reads all
    that it is computed from.
    """
    found = Storages()
    anew = set(fused)
    operands = {each.name: each.operand for each in reuses}
    named = {node.name: node for node in graph.nodes} if operands else {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        viewed = node.args[0] if node.target is operator.getitem else _viewed_argument(node)
        if node in fused or viewed in anew:
            found.of[node] = found.read_by(node)
            found.views.add(node)
            anew.add(node)
        elif node.target is operator.getitem:
            found.of[node] = _element(found, node)
            found.views.add(node)
        elif node.target is COPY_OUT:
            found.of[node] = ()
        elif node.name in operands:
            found.of[node] = found.of[named[operands[node.name]]]
            found.written_over.update(found.of[node])
        elif isinstance(viewed, fx.Node):
            shared = found.of.get(viewed, ())[:1]
            found.of[node] = shared * max(1, len(list(tensors_of(node))))
            found.views.add(node)
        else:
            found.of[node] = tuple(_new_storage(found, node, value) for value in tensors_of(node))
    return found


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node yields, one level of tuple or list deep, as fake tensors."""
    value = node.meta.get("val")
    for element in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(element, torch.Tensor):
            yield element


def is_view(node: fx.Node) -> bool:
    """Whether the node's result is other words for memory that one of its arguments holds."""
    return _viewed_argument(node) is not None


def _viewed_argument(node: fx.Node) -> fx.Node | None:
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    if target in _SILENT_VIEWS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if not any(result.alias_info is not None for result in schema_of(target).returns):
        return None
    for argument, value in zip(schema_of(target).arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def _element(found: Storages, getitem: fx.Node) -> tuple[int, ...]:
    source, index = getitem.args
    assert isinstance(source, fx.Node)
    value = source.meta.get("val")
    if not isinstance(value, (tuple, list)) or not isinstance(getitem.meta.get("val"), torch.Tensor):
        return ()
    before = sum(isinstance(element, torch.Tensor) for element in value[: operator.index(index)])  # type: ignore[arg-type]
    return found.of[source][before : before + 1]


def _new_storage(found: Storages, node: fx.Node, value: torch.Tensor) -> int:
    found.infos.append(StorageInfo(node.name, storage_bytes(value), node))
    return len(found.infos) - 1


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the memory behind a tensor; sizes that depend on data count as the largest they may be."""
    nbytes = value.untyped_storage().nbytes()
    return nbytes if isinstance(nbytes, int) else upper_bound(nbytes)

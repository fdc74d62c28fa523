"""Which memory the values of a graph lie in: what makes a block of memory, what reads it, and until when.

`find_aliases` follows tensors through a graph from node to node. `storages` compares the stored fake tensors instead:
it is exact for a graph as it was traced, also where operators work in place, but not for one in which a pass has copied
calls, since copies share their stored values.
"""

import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from passes.compat import schema_of
from passes.graphs.node_facts import OPERATOR_OVERLOAD, tensors
from passes.graphs.op_kinds import WITH_INPLACE_VARIANT, mutated_arguments, op_name
from passes.ops.offload_ops import COPY_OUT

# Besides those of `WITH_INPLACE_VARIANT`: operators that make their results in new memory.
_MAKERS = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_log_softmax",
        "_native_batch_norm_legit_functional", "_softmax", "_to_copy", "addmm",
        "avg_pool2d_backward", "baddbmm", "bmm", "cat", "clone", "constant_pad_nd", "convolution",
        "convolution_backward", "embedding", "embedding_dense_backward", "gather", "index", "index_select",
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "mean", "mm", "native_batch_norm_backward",
        "native_dropout", "native_dropout_backward", "native_group_norm", "native_group_norm_backward",
        "native_layer_norm", "native_layer_norm_backward", "nll_loss_backward", "rsub", "sum",
    }
)  # fmt: skip


def makes_memory(node: Node) -> bool:
    """Returns whether every result of a call is known to have a new storage of its own."""
    if node.op != "call_function" or mutated_arguments(node):
        return False
    return node.target in WITH_INPLACE_VARIANT or op_name(node) in _MAKERS


WAIT: Any = getattr(getattr(torch.ops._c10d_functional, "wait_tensor", None), "default", None)
"""The operator that waits for a collective, and returns its result; None in builds without torch.distributed."""
# They share their input's memory although their schema does not say so.
_SILENT_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default, WAIT})


def storages(node: Node) -> frozenset[Hashable]:
    """Returns a key for each storage behind the fake tensors in `node.meta["val"]`; equal keys mean the same memory."""
    return frozenset(
        StorageWeakRef(value.untyped_storage())  # type: ignore[no-untyped-call]
        for value in tensors(node.meta.get("val"))
        if value.layout == torch.strided
    )


def storages_of(nodes: Iterable[Node]) -> frozenset[Hashable]:
    """Returns the keys of all storages behind the values of the nodes."""
    return frozenset[Hashable]().union(*map(storages, nodes))


def viewed_argument(node: Node) -> Node | None:
    """Returns the argument whose memory the node's result shares, by the operator's schema; None without one.

    For in-place operators it is the argument that they write to."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OPERATOR_OVERLOAD):
        return None
    if target in _SILENT_VIEWS:
        return node.args[0] if isinstance(node.args[0], Node) else None
    if not any(result.alias_info is not None for result in schema_of(target).returns):
        return None
    for argument, value in zip(schema_of(target).arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, Node):
            return value
    return None


def results_of(node: Node) -> Iterator[torch.Tensor]:
    """Yields the tensors that a node returns, as fake tensors: the value itself, or the elements of a tuple or list."""
    value = node.meta.get("val")
    for element in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(element, torch.Tensor):
            yield element


@dataclass(frozen=True)
class _Block:
    """A block of memory: the node that makes it (an input if it exists before the run), and the fake tensor made."""

    maker: Node
    value: torch.Tensor


@dataclass
class Aliases:
    """The blocks of memory of a graph, numbered in the order of their making, and which nodes' values they hold."""

    graph: Graph
    blocks: list[_Block] = field(default_factory=list)
    of: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    """Per node: the number of the block of each tensor that it returns; by `find_cautious_aliases`, of all blocks that
    these may lie in."""
    written_over: set[int] = field(default_factory=set)
    """The blocks in which a call writes its result over an operand (see `find_aliases`)."""

    def read_by(self, node: Node) -> tuple[int, ...]:
        """Returns the numbers of the blocks that a node reads, also through views, in the order of its arguments."""
        return tuple(dict.fromkeys(block for source in node.all_input_nodes for block in self.of.get(source, ())))

    def made_by(self, node: Node) -> tuple[int, ...]:
        """Returns the numbers of the blocks that a node allocates."""
        return tuple(block for block in dict.fromkeys(self.of.get(node, ())) if self.blocks[block].maker is node)

    @cached_property
    def readers(self) -> Mapping[int, tuple[Node, ...]]:
        """Block number → the nodes that read the block, also through views, in the graph's order, output included."""
        found: dict[int, list[Node]] = {}
        for node in self.graph.nodes:
            for block in self.read_by(node):
                found.setdefault(block, []).append(node)
        return {block: tuple(nodes) for block, nodes in found.items()}

    @cached_property
    def last_reader(self) -> Mapping[int, Node]:
        """Block number → the last node that may read the block. Taking an element out of a tuple counts as no read; a
        block that nothing reads is absent."""
        calls = {block: [node for node in nodes if not _takes_element(node)] for block, nodes in self.readers.items()}
        return {block: nodes[-1] for block, nodes in calls.items() if nodes}

    def own_block(self, node: Node) -> int | None:
        """Returns the number of the one block that holds a node's value, if a call of the graph made it.

        None where the value may be in several blocks, or in memory that exists before the graph runs."""
        blocks = self.of.get(node, ())
        single = len(blocks) == 1 and self.blocks[blocks[0]].maker.op == "call_function"
        return blocks[0] if single else None

    def _make(self, node: Node) -> tuple[int, ...]:
        first = len(self.blocks)
        self.blocks += [_Block(node, value) for value in results_of(node)]
        return tuple(range(first, len(self.blocks)))


def find_aliases(
    graph: Graph, fused: Iterable[Node] = (), written_over: Mapping[str, str] = MappingProxyType({})
) -> Aliases:
    """Returns which block of memory holds each tensor of a functional ATen graph.

    Views and aliases, by their schema, lie in the memory of their argument. Every other tensor is a block of its own.

    Args:
        graph: nodes carry fake tensors in `meta["val"]`; sizes may be symbolic.
        fused: nodes whose values are never in memory, since each kernel that reads one computes it. A reader of such a
            node counts as a reader of that node's inputs.
        written_over: name of a call that writes its result over an operand → name of that operand.
    """
    found, recomputed = Aliases(graph), set(fused)
    named = {node.name: node for node in graph.nodes} if written_over else {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        viewed = node.args[0] if _takes_element(node) else viewed_argument(node)
        if node in recomputed or viewed in recomputed:
            found.of[node] = found.read_by(node)
            recomputed.add(node)
        elif _takes_element(node):
            found.of[node] = _element(found, node)
        elif node.target is COPY_OUT:  # its result is the host's memory
            found.of[node] = ()
        elif node.name in written_over:
            found.of[node] = found.of[named[written_over[node.name]]]
            found.written_over.update(found.of[node])
        elif isinstance(viewed, Node):
            found.of[node] = found.of.get(viewed, ())[:1] * max(1, len(list(results_of(node))))
        else:
            found.of[node] = found._make(node)
    return found


def find_cautious_aliases(graph: Graph) -> Aliases:
    """Returns all blocks of memory that may hold each tensor of an ATen graph, functional or not.

    Only operators that are known to make new memory for their results (`makes_memory`), and calls that read no tensor,
    are assumed to do so. The result of any other call may share the memory of everything that it reads."""
    found = Aliases(graph)
    for node in graph.nodes:
        source = node.args[0] if _takes_element(node) else None
        if node.op in ("placeholder", "get_attr") or makes_memory(node):
            found.of[node] = found._make(node)
        elif isinstance(source, Node) and makes_memory(source):
            found.of[node] = _element(found, node)
        elif node.op == "call_function" and "val" in node.meta and not any(True for _ in tensors(node.meta["val"])):
            found.of[node] = ()  # a size or another number
        elif node.op != "output":
            found.of[node] = found.read_by(node) or found._make(node)
    return found


def _takes_element(node: Node) -> bool:
    return node.target is operator.getitem


def _element(found: Aliases, getitem: Node) -> tuple[int, ...]:
    """The block of the element that a getitem takes out of a tuple."""
    source, index = getitem.args
    assert isinstance(source, Node)
    value = source.meta.get("val")
    if not isinstance(value, (tuple, list)) or not isinstance(getitem.meta.get("val"), torch.Tensor):
        return ()
    before = sum(isinstance(element, torch.Tensor) for element in value[: operator.index(index)])  # type: ignore[arg-type]
    return found.of[source][before : before + 1]

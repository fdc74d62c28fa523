"""The storages of a joint graph with their bytes, and the values that a fusing compiler never holds in memory, since
the kernels that read them compute them. The rules of fusing are those of inductor (`torch/_inductor/graph.py`
`run_node`, `ir.py` `mark_reuse`); in doubt a value counts as held."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from memopt.compat.host import is_on_host
from memopt.compat.operators import OpOverload, schema_of
from memopt.compat.symbols import largest_value
from passes import is_pure
from passes.graphs.aliases import Aliases, find_aliases, results_of, viewed_argument
from passes.graphs.node_facts import backward_nodes, is_tangent
from passes.graphs.op_kinds import is_pointwise, mutated_arguments, op_name

tensors_of = results_of
_PRIMS = ("prims",)


class Storages(Aliases):
    """The storages of a graph with their bytes: the blocks of memory that `find_aliases` finds in the graph."""

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """The bytes of every storage, in the order of `blocks`."""
        return tuple(made_bytes(block.maker, block.value) for block in self.blocks)


def find_storages(
    graph: fx.Graph, fused: frozenset[fx.Node] = frozenset(), reuses: Iterable[tuple[str, str]] = ()
) -> Storages:
    """Returns the storages of a functional ATen graph (see `find_aliases`), each as large as the storage of the fake
    tensor made in it. The values of `fused` nodes are never held, the results of the calls that `reuses` names are
    written over the operands named with them, and a copy in the host's memory (`memopt::copy_out`) has no storage."""
    return Storages(**vars(find_aliases(graph, fused, dict(reuses))))


def is_mutation(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def is_view(node: fx.Node) -> bool:
    """Returns whether the node's result shares the memory of one of its arguments."""
    return viewed_argument(node) is not None


def made_bytes(maker: fx.Node, value: torch.Tensor) -> int:
    """The bytes of the storage that the node `maker` makes for its result `value`. A tangent (an input of the joint
    graph) counts with the size of `value` itself, even where the output is a view of a larger tensor."""
    if not is_tangent(maker):
        return storage_bytes(value)
    return largest_value(math.prod(value.shape) * value.element_size())


def storage_bytes(value: torch.Tensor) -> int:
    """The bytes of the storage behind a tensor; data-dependent sizes count as the largest possible."""
    return largest_value(value.untyped_storage().nbytes())


# Elementwise, though torch does not tag them so.
_ELEMENTWISE = frozenset({"_to_copy", "embedding", "full", "gather", "index", "index_select", "scalar_tensor"})
_ELEMENTWISE_PRIMS = frozenset({"convert_element_type", "fma", "inductor_lookup_seed", "inductor_random", "iota"})
_REDUCTIONS = frozenset({"all", "amax", "amin", "any", "argmax", "argmin", "mean", "prod", "sum", "var", "var_mean"})
# Prims that inductor has kernels for; only their implementations for eager mode hold temporaries.
_KERNELS_OF_PRIMS = frozenset(
    {"_low_memory_max_pool_offsets_to_indices", "_low_memory_max_pool_with_offsets", "prepare_softmax_online"}
)
# They write their operands into parts of the result.
_ASSEMBLERS = frozenset({"cat", "constant_pad_nd"})
# Random numbers from a seed are pure, but expensive: not repeated unless a plan says so.
_DRAWS = "inductor_random"
# Too expensive on a CPU to be computed in several kernels.
_EXPENSIVE_ON_CPU = frozenset({"exp", "sigmoid"})
# Inductor holds a value that is computed from more values than this, if several kernels read it, or one.
_MOST_READ, _MOST_READ_ONCE = 4, 8
# It also holds one that takes more operators than this.
_MOST_OPERATORS = 24
# The values that it is computed from may be larger by this factor, for statistics of rows and biases.
_MARGIN = 1.05


@dataclass(frozen=True)
class _Inlined:
    """The cost of computing a value in a kernel that reads it."""

    reads: frozenset[fx.Node] = frozenset()
    """The held values that it reads."""
    operators: int = 0
    draws: bool = False


def fused_away(graph: fx.Graph, held: frozenset[fx.Node] = frozenset()) -> frozenset[fx.Node]:
    """The nodes of a joint graph whose values a fusing compiler never writes to memory. Nodes in `held` are not among
    them.

    Such a node is elementwise, and all its readers, perhaps behind views, are elementwise operators, reductions,
    concatenations or paddings, which can compute it in their kernels. If it has several readers, or one in the other
    half (forward or backward), its value must also be no smaller than the values that it is computed from, so that
    holding those instead costs no memory."""
    return _Fusion(graph, held).run()


@dataclass
class _Fusion:
    graph: fx.Graph
    held: frozenset[fx.Node]
    inlined: dict[fx.Node, _Inlined] = field(default_factory=dict)

    def run(self) -> frozenset[fx.Node]:
        self.backward = backward_nodes(self.graph)
        self.mutated = {argument for node in self.graph.nodes for argument in mutated_arguments(node)}
        for node in self.graph.nodes:
            if self.may_fuse(node) and self.is_worth(node, cost := self.cost(node)):
                self.inlined[node] = cost
        return frozenset(self.inlined)

    def may_fuse(self, node: fx.Node) -> bool:
        """Returns whether the node is elementwise, and all its readers can compute it in their kernels."""
        if not (is_elementwise(node) and is_pure(node) and isinstance(node.meta.get("val"), torch.Tensor)):
            return False
        if node in self.held:
            return False
        return all(can_inline(reader) for reader in readers_of(node))

    def is_worth(self, node: fx.Node, cost: _Inlined) -> bool:
        if self.mutated.intersection(cost.reads) or cost.operators > _MOST_OPERATORS:
            return False
        readers = list(readers_of(node))
        same_half = all((reader in self.backward) == (node in self.backward) for reader in readers)
        if same_half and len(readers) == 1:
            return len(cost.reads) <= _MOST_READ_ONCE
        value = node.meta["val"]
        if cost.draws or (is_on_host(value) and op_name(node) in _EXPENSIVE_ON_CPU):
            return False
        held = sum(storage_bytes(read.meta["val"]) for read in cost.reads if read.op != "placeholder")
        return len(cost.reads) <= _MOST_READ and held <= _MARGIN * storage_bytes(value)

    def cost(self, node: fx.Node) -> _Inlined:
        """Returns the cost of computing a value from held ones."""
        reads: set[fx.Node] = set()
        operators, draws = 1, op_name(node, _PRIMS) == _DRAWS
        for argument in map(behind_views, node.all_input_nodes):
            if argument in self.inlined:
                behind = self.inlined[argument]
                reads |= behind.reads
                operators, draws = operators + behind.operators, draws or behind.draws
            elif isinstance(argument.meta.get("val"), torch.Tensor):
                reads.add(argument)
        return _Inlined(frozenset(reads), operators, draws)


def is_elementwise(node: fx.Node) -> bool:
    """Returns whether every element of the node's result is computed separately from elements of its arguments."""
    if name := op_name(node):
        return name not in _ASSEMBLERS and (is_pointwise(node) or name in _ELEMENTWISE)
    return op_name(node, _PRIMS) in _ELEMENTWISE_PRIMS


def can_inline(node: fx.Node) -> bool:
    """Returns whether a fusing compiler can compute the node's arguments within the kernel of the node."""
    return is_elementwise(node) or op_name(node) in _REDUCTIONS | _ASSEMBLERS


def is_generated(node: fx.Node) -> bool:
    """Returns whether a fusing compiler generates the kernel that computes the node; such a kernel has no workspace."""
    return can_inline(node) or op_name(node, _PRIMS) in _KERNELS_OF_PRIMS


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the readers of a value, also those behind views; the graph's output counts as a reader."""
    for user in node.users:
        if is_view(user):
            yield from readers_of(user)
        else:
            yield user


def behind_views(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node

"""Which values of a joint graph a compiler that fuses never holds, since each kernel that reads them computes them.

The rules are inductor's (`torch/_inductor/graph.py` `run_node`, `ir.py` `mark_reuse`), on the side of more memory: what
they leave in doubt counts as held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from memopt.compat.operators import OpOverload
from memopt.device.storages import is_view, storage_bytes
from passes import is_pure
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import is_pointwise, mutated_arguments, op_name

# Computed element by element, though torch does not tag them so.
_ELEMENTWISE = frozenset({"_to_copy", "embedding", "full", "gather", "index", "index_select", "scalar_tensor"})
_ELEMENTWISE_PRIMS = frozenset({"convert_element_type", "fma", "inductor_lookup_seed", "inductor_random", "iota"})
_REDUCTIONS = frozenset({"all", "amax", "amin", "any", "argmax", "argmin", "mean", "prod", "sum", "var", "var_mean"})
# Write what they are given into parts of their result.
_ASSEMBLERS = frozenset({"cat", "constant_pad_nd"})
# Draws from a seed are pure, but dear: never repeated without the plan's wanting it.
_DRAWS = "inductor_random"
# Too dear on a CPU to be computed in each of several kernels.
_DEAR_ON_CPU = frozenset({"exp", "sigmoid"})
# Inductor holds a value that would read more than so many others if there are several kernels, or only one.
_MOST_READ, _MOST_READ_ONCE = 4, 8
# … or that is the result of more operators than this.
_MOST_OPERATORS = 24
# A source may be that much larger than what is computed from it: statistics of rows, biases.
_MARGIN = 1.05


@dataclass(frozen=True)
class _Inlined:
    """What computing a value anew takes."""

    reads: frozenset[fx.Node] = frozenset()
    """The held values that are read."""
    operators: int = 0
    draws: bool = False


def fused_away(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes of a canonical joint graph whose values are never held.

    A value is one of them if it is elementwise and all that read it, perhaps through views, can compute it on the fly:
    elementwise operators and reductions. One that both halves read, or several kernels of one half, must in addition be
    no smaller than what it is computed from: then holding that instead is no worse.
    """
    return _Fusion(graph).run()


@dataclass
class _Fusion:
    graph: fx.Graph
    inlined: dict[fx.Node, _Inlined] = field(default_factory=dict)

    def run(self) -> frozenset[fx.Node]:
        self.backward = backward_nodes(self.graph)
        self.mutated = {each for node in self.graph.nodes for each in mutated_arguments(node)}
        for node in self.graph.nodes:
            if self.may_fuse(node) and self.is_worth(node, cost := self.cost(node)):
                self.inlined[node] = cost
        return frozenset(self.inlined)

    def may_fuse(self, node: fx.Node) -> bool:
        """Whether the node is elementwise, and so is, or reduces, all that reads it."""
        if not (is_elementwise(node) and is_pure(node) and isinstance(node.meta.get("val"), torch.Tensor)):
            return False
        return all(can_inline(reader) for reader in _readers(node))

    def is_worth(self, node: fx.Node, cost: _Inlined) -> bool:
        if self.mutated.intersection(cost.reads) or cost.operators > _MOST_OPERATORS:
            return False
        readers = list(_readers(node))
        same_half = all((reader in self.backward) == (node in self.backward) for reader in readers)
        if same_half and len(readers) == 1:
            return len(cost.reads) <= _MOST_READ_ONCE
        value = node.meta["val"]
        if cost.draws or (value.device.type == "cpu" and op_name(node) in _DEAR_ON_CPU):
            return False
        held = sum(storage_bytes(each.meta["val"]) for each in cost.reads if each.op != "placeholder")
        return len(cost.reads) <= _MOST_READ and held <= _MARGIN * storage_bytes(value)

    def cost(self, node: fx.Node) -> _Inlined:
        """What a value costs to compute anew from held ones."""
        reads: set[fx.Node] = set()
        operators, draws = 1, op_name_of(node) == _DRAWS
        for argument in map(_behind_views, node.all_input_nodes):
            if argument in self.inlined:
                behind = self.inlined[argument]
                reads |= behind.reads
                operators, draws = operators + behind.operators, draws or behind.draws
            elif isinstance(argument.meta.get("val"), torch.Tensor):
                reads.add(argument)
        return _Inlined(frozenset(reads), operators, draws)


def op_name_of(node: fx.Node) -> str:
    """The operator's name without its namespace, of aten or prims; empty for anything else."""
    target = node.target
    if isinstance(target, OpOverload) and target.namespace in ("aten", "prims"):
        return target.overloadpacket.__name__
    return ""


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the node's result is computed by itself from elements of its arguments."""
    name = op_name_of(node)
    if op_name(node):
        return name not in _ASSEMBLERS and (is_pointwise(node) or name in _ELEMENTWISE)
    return name in _ELEMENTWISE_PRIMS


def can_inline(node: fx.Node) -> bool:
    """Whether a fusing compiler computes the node's arguments on the fly."""
    return is_elementwise(node) or (op_name_of(node) in _REDUCTIONS | _ASSEMBLERS and bool(op_name(node)))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Those that read a value, through views as well; the graph's output is one."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _behind_views(node: fx.Node) -> fx.Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node

"""Merges calls that compute the same value."""

from collections.abc import Hashable
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.aliases import storages
from passes.graphs.edit import replace_node
from passes.graphs.node_facts import (
    argument_key,
    backward_nodes,
    binds_new_symbols,
    is_pure,
    may_write,
    tensors,
)


@dataclass(frozen=True)
class MergeCommonSubexpressions(Pass):
    """Merges pure calls of the same operator on the same arguments, bit for bit the same value.

    A backward call is merged with a forward one only if the value is a view or has at most `across_halves_bytes`:
    saving anything larger is the planner's decision. Two calls with a write to memory between them, and values that are
    returned or written to, are left alone. This undoes recomputation: run it before planning.

    Before:
        t: f32[8, 4] = aten.t(primals_1)
        t_1: f32[8, 4] = aten.t(primals_1)
        mm: f32[2, 4] = aten.mm(primals_2, t_1)
    After:
        t: f32[8, 4] = aten.t(primals_1)
        mm: f32[2, 4] = aten.mm(primals_2, t)
    """

    across_halves_bytes: int = 65_536

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        backward = backward_nodes(graph)
        held = {node: storages(node) for node in graph.nodes}
        untouchable = _shared_or_written(graph, held)
        returned = set(graph.output_node().all_input_nodes)
        writes_so_far = 0
        first_of: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if not is_pure(node):
                writes_so_far += may_write(node)
                continue
            own = held[node].difference(*(held[source] for source in node.all_input_nodes))
            if node in returned or own & untouchable or binds_new_symbols(node):
                continue
            apart = node in backward and bool(own) and _size_bytes(node) > self.across_halves_bytes
            key = (node.target, argument_key((node.args, node.kwargs)), apart, writes_so_far)
            first = first_of.setdefault(key, node)
            if first is not node:
                replace_node(node, first)
        return graph_module


def _shared_or_written(graph: Graph, held: dict[Node, frozenset[Hashable]]) -> frozenset[Hashable]:
    """Returns the storages that are returned or may be written to; values in them are not merged."""
    exposed = set(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if may_write(node):
            exposed.update(node.all_input_nodes)
    return frozenset().union(*(held[node] for node in exposed))


def _size_bytes(node: Node) -> int | float:
    """Returns the bytes of a call's outputs; infinite if a size is symbolic, since reading it would add a guard."""
    total = 0
    for tensor in tensors(node.meta.get("val")):
        if not all(isinstance(size, int) for size in tensor.shape):
            return float("inf")
        total += tensor.numel() * tensor.element_size()
    return total

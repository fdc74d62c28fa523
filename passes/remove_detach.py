"""Removal of operators that mean something to autograd only."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.node_facts import may_write

_NO_OPERATIONS = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
)


@dataclass(frozen=True)
class RemoveDetach(Pass):
    """Replaces detach, alias and lift_fresh by their input: autograd has been traced away, they compute nothing.

    One that is returned stays if its input is returned or an input of the graph: they must remain two tensors.

    Before:
        tanh: f32[4] = aten.tanh(primals_1)
        detach: f32[4] = aten.detach(tanh)
        tanh_backward: f32[4] = aten.tanh_backward(tangents_1, detach)
    After:
        tanh: f32[4] = aten.tanh(primals_1)
        tanh_backward: f32[4] = aten.tanh_backward(tangents_1, tanh)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        returned = set(graph.output_node().all_input_nodes)
        for node in list(graph.nodes):
            if node.target not in _NO_OPERATIONS:
                continue
            (source,) = node.all_input_nodes
            if node in returned and (source in returned or source.op in ("placeholder", "get_attr")):
                continue
            if _written_to(node) or _written_to(source):
                continue
            if node in returned:
                returned.add(source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        return graph_module


def _written_to(node: Node) -> bool:
    """True if an operator may change the tensor in place: its sizes too, which a detached view does not share."""
    return any(may_write(user) for user in node.users)

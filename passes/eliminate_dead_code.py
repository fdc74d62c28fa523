"""Removal of values that nothing uses."""

from dataclasses import dataclass

from torch.fx import GraphModule

from passes.graph_pass import Pass
from passes.graphs.node_facts import is_pure


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Removes pure calls and constants that nothing uses; random ones are kept, since they advance the generator.

    Before:
        mul: f32[4] = aten.mul.Tensor(primals_1, 2.0)
        native_dropout: (f32[4], b8[4]) = aten.native_dropout(primals_1, 0.1, True)
        getitem: f32[4] = native_dropout[0]
        return (primals_1,)
    After:
        native_dropout: (f32[4], b8[4]) = aten.native_dropout(primals_1, 0.1, True)
        return (primals_1,)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        # Users come after their inputs, so one walk from the end frees whole chains.
        for node in reversed(graph_module.graph.nodes):
            if not node.users and is_pure(node):
                graph_module.graph.erase_node(node)
        return graph_module

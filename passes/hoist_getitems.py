"""Moves the elements of tuples to the calls that return them."""

import operator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.graph_pass import Pass


@dataclass(frozen=True)
class HoistGetitems(Pass):
    """Moves every getitem directly after the call whose tuple it reads, so that unused outputs are freed at once.

    Before:
        split: (f32[2], f32[2]) = aten.split.Tensor(primals_1, 2)
        neg: f32[2] = aten.neg(primals_2)
        getitem: f32[2] = split[0]
    After:
        split: (f32[2], f32[2]) = aten.split.Tensor(primals_1, 2)
        getitem: f32[2] = split[0]
        neg: f32[2] = aten.neg(primals_2)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        last_of: dict[Node, Node] = {}
        for node in graph_module.graph.find_nodes(op="call_function", target=operator.getitem):
            producer = node.args[0]
            # An input that is a tuple stays with the other inputs, which come first.
            if not isinstance(producer, Node) or producer.op == "placeholder" or not isinstance(node.args[1], int):
                continue
            last_of.get(producer, producer).append(node)
            last_of[producer] = node
        return graph_module

"""Moves the waits for collectives directly behind them."""

from dataclasses import dataclass

from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.aliases import WAIT


@dataclass(frozen=True)
class WaitAtOnce(Pass):
    """Moves every wait directly after the collective that it waits for.

    What a collective reads and writes is in use until its wait: nothing may be written over it, and it takes memory.

    Before:
        all_reduce: f32[4] = _c10d_functional.all_reduce(primals_1, 'sum', '0')
        neg: f32[4] = aten.neg(primals_1)
        wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)
    After:
        all_reduce: f32[4] = _c10d_functional.all_reduce(primals_1, 'sum', '0')
        wait_tensor: f32[4] = _c10d_functional.wait_tensor(all_reduce)
        neg: f32[4] = aten.neg(primals_1)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.find_nodes(op="call_function", target=WAIT) if WAIT else ():
            collective = node.args[0]
            # A wait in the other half of the step stays there.
            if isinstance(collective, Node) and _half(collective) == _half(node) and collective.op == "call_function":
                collective.append(node)
        return graph_module


def _half(node: Node) -> object:
    return node.meta.get("partitioner_tag")

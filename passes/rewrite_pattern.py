"""The base class of peephole passes, which find a small pattern that ends at a node, and replace it."""

import abc
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.edit import erase_unread, replace_node
from passes.graphs.propagate import on_stored_values
from passes.graphs.verify import VerifyError

Found = TypeVar("Found")


@dataclass(frozen=True)
class RewritePattern(Pass, Generic[Found]):
    """A pass that replaces calls one by one. A subclass says which (`match`) and by what (`replace`).

    Calls are visited in the graph's order, each after all replacements before it. Calls that `replace` makes are not
    visited. Pure calls that only the replaced call read are erased with it.

    Before:
        pow_1: f32[4] = aten.pow.Tensor_Scalar(x, 2)
    After a pattern whose `match` returns `args[0]` of squares, and whose `replace` returns `new_call(node, mul, x, x)`:
        mul: f32[4] = aten.mul.Tensor(x, x)
    """

    @abc.abstractmethod
    def match(self, node: Node) -> Found | None:
        """Returns the data that `replace` needs of the pattern that ends at this call; None or False for no pattern.

        Must not change the graph.
        """

    @abc.abstractmethod
    def replace(self, node: Node, found: Found) -> Node:
        """Returns the node whose value all users of `node` read from now on; or `node` itself, which may be changed.

        `found` is what `match` returned. New calls are inserted in front of `node`, and `new_call` makes them.
        """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        with on_stored_values(graph):
            for node in graph.nodes:
                found = self.match(node) if node.op == "call_function" else None
                if found is None or found is False:
                    continue
                with graph.inserting_before(node):
                    replacement = self.replace(node, found)
                if not isinstance(replacement, Node):
                    problem = f"replace returned {type(replacement).__name__} for it"
                    raise VerifyError(node.name, problem, "return the node that takes its place, or the node itself")
                if replacement is not node:
                    sources = node.all_input_nodes
                    replace_node(node, replacement)
                    erase_unread(sources)
        return graph_module

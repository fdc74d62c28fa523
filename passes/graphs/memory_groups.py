"""Which nodes of a graph may be the same memory: what is not known to be new shares that of all it reads."""

import operator

import torch
from torch.fx import Graph, Node

from passes.graphs.node_facts import tensors
from passes.ops.inplace_ops import makes_memory


class MemoryGroups:
    """Blocks of memory, each named by the node that makes it, and the nodes that may look at it.

    Stored values do not tell: two evaluations of one call share one.
    """

    def __init__(self, graph: Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.makers: dict[Node, frozenset[Node]] = {}
        """For each node the blocks that it may look at."""
        self.members: dict[Node, set[Node]] = {}
        """For each block the nodes that may look at it."""
        for node in graph.nodes:
            self.makers[node] = self._makers(node)
            for maker in self.makers[node]:
                self.members.setdefault(maker, set()).add(node)

    def _makers(self, node: Node) -> frozenset[Node]:
        if node.op in ("placeholder", "get_attr") or is_new(node):
            return frozenset([node])
        if node.op == "call_function" and "val" in node.meta and not any(True for _ in tensors(node.meta["val"])):
            return frozenset()  # a size or another number
        return frozenset[Node]().union(*(self.makers[each] for each in node.all_input_nodes))

    def block(self, node: Node) -> Node | None:
        """The one block that a node looks at; None where it may be several, or one that is not made here."""
        makers = self.makers[node]
        return next((maker for maker in makers if is_new(maker)), None) if len(makers) == 1 else None

    def last_read(self, block: Node) -> int:
        """The place of the last call that may look at a block."""
        return max((self.place[user] for each in self.members[block] for user in each.users), default=-1)


def is_new(node: Node) -> bool:
    """Whether a node is a tensor in memory that nothing before it looks at."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(node.meta.get("val"), torch.Tensor) and isinstance(source, Node) and makes_memory(source)

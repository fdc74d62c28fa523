"""Edits that passes share: adding a call, replacing a node, and erasing nodes that nothing reads."""

from collections.abc import Iterable
from typing import Any

from torch.fx import Node

from passes.graphs.node_facts import is_pure
from passes.graphs.propagate import refresh

_ORIGIN = (
    "nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "autograd_backward", "custom",
)  # fmt: skip
"""The entries of `Node.meta` that say where a call comes from: module, line of code, half of the graph, annotations."""


def new_call(like: Node, target: Any, *args: Any, node_name: str = "", **kwargs: Any) -> Node:
    """Returns a new call of an operator, made at the insertion point of `like`'s graph.

    The module, the line of code and the half of the graph in its metadata are those of `like`. Its stored value is
    computed from those of its arguments, which needs `on_stored_values` around it. It gets a name like `node_name`, by
    default that of the operator without its overload.
    """
    name = node_name or target.__name__.partition(".")[0]
    node = like.graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta.update({key: like.meta[key] for key in _ORIGIN if key in like.meta})
    refresh(node)
    return node


def replace_node(node: Node, by: Node) -> None:
    """Has all users of a node read another one, and erases it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def erase_unread(nodes: Iterable[Node]) -> None:
    """Erases those of the nodes that are pure and unread, and then their inputs that have become so."""
    pending = list(dict.fromkeys(nodes))
    erased: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in erased or node.users or not is_pure(node):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        pending += sources

"""Marks on the nodes of a graph: in a graph that is traced from it, each node tells which one it was traced from."""

from __future__ import annotations

from torch import fx

_OPERATOR = "memopt_operator"
"""The entry of `node.meta["custom"]` with the name of the node that a node was traced from."""


def mark_operators(graph: fx.Graph) -> None:
    """Mark each node with its name, which `traced_from` then finds on every node that is traced from it."""
    for node in graph.nodes:
        # Tracers copy this entry to every node that they create for this one, in the backward too.
        node.meta["custom"] = {**node.meta.get("custom", {}), _OPERATOR: node.name}


def without_mark(node: fx.Node) -> None:
    """Remove from a traced node the mark that `mark_operators` left."""
    custom = {name: value for name, value in node.meta.get("custom", {}).items() if name != _OPERATOR}
    node.meta.update(custom=custom) if custom else node.meta.pop("custom", None)


def traced_from(node: fx.Node) -> str:
    """The name of the marked node that this node was traced from; "" where there is none."""
    return str(node.meta.get("custom", {}).get(_OPERATOR, ""))

"""Marks on the nodes of a graph, which tracing copies: in the traced graph they say where each node comes from."""

from __future__ import annotations

from torch import fx

_OPERATOR = "memopt_operator"
"""The entry of `node.meta["custom"]` with the name of the node that a node was traced from."""


def mark_operators(graph: fx.Graph) -> None:
    """Write into the metadata of each node its own name. Tracers copy this entry to every node that they make from that
    node, in the backward too; `traced_from` reads the copy."""
    for node in graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), _OPERATOR: node.name}


def without_mark(node: fx.Node, mark: str = _OPERATOR) -> None:
    """Remove a mark from a traced node, by default the name that `mark_operators` wrote and tracing copied."""
    custom = {name: value for name, value in node.meta.get("custom", {}).items() if name != mark}
    node.meta.update(custom=custom) if custom else node.meta.pop("custom", None)


def traced_from(node: fx.Node) -> str:
    """The name of the node that `node` was traced from, which `mark_operators` wrote before the trace; "" for a node
    without this mark."""
    return str(node.meta.get("custom", {}).get(_OPERATOR, ""))

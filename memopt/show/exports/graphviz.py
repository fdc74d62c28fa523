"""A plan's joint graph in the DOT language: Graphviz draws it, Netron opens it.

Labels have the form in which `torch.fx`'s own drawer writes them, which is the one that Netron takes apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memopt.units import duration, size

if TYPE_CHECKING:
    from networkx import DiGraph

_COLOURS = {
    "saved": "#cfe0f2",
    "recomputed": "#f8dcc0",
    "offloaded": "#f4cfdc",
    "output": "#e3d7ef",
    "gradient": "#d5c6e6",
    "temporary": "#d5ebe4",
}
_LEFT_OUT = frozenset({"input", "alias"})
_ESCAPED = str.maketrans({char: f"\\{char}" for char in '\\"{}|<>'})


def graphviz(graph: DiGraph) -> str:
    """The text of a directed graph with the attributes of `Plan.networkx`: operator, module, fate, bytes and time in
    each node, which is coloured by its fate.

    Inputs and views are left out, so that Graphviz can lay the graph out: an operator that reads a view is joined to
    the operator whose memory it sees.
    """
    return "\n".join(("digraph plan {", *_lines(graph), "}", ""))


def _lines(graph: DiGraph) -> Iterator[str]:
    yield "  rankdir=TB; nslimit=1; nslimit1=1; mclimit=0.2; splines=line;"
    yield '  node [shape=record, style=filled, fillcolor="#ffffff", fontname="Helvetica", fontsize=10];'
    for name, facts in graph.nodes(data=True):
        if facts["fate"] not in _LEFT_OUT:
            colour = _COLOURS.get(facts["fate"], "#ffffff")
            yield f'  "{_escaped(name)}" [label="{_label(name, facts)}", fillcolor="{colour}"{_source(facts)}];'
    for reader, makers in _makers(graph).items():
        if graph.nodes[reader]["fate"] not in _LEFT_OUT:
            yield from (f'  "{_escaped(maker)}" -> "{_escaped(reader)}";' for maker in makers)


def _makers(graph: DiGraph) -> dict[str, tuple[str, ...]]:
    """For each node the shown nodes that it reads, itself or through nodes that are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for name in graph:  # in the order of the graph, in which a node comes after those that it reads
        read: dict[str, None] = {}
        for before in graph.predecessors(name):
            shown = graph.nodes[before]["fate"] not in _LEFT_OUT
            read |= dict.fromkeys((before,) if shown else found.get(before, ()))
        found[name] = tuple(read)
    return found


def _label(name: str, facts: dict[str, Any]) -> str:
    kind = facts["kind"] or "account"
    rows = {
        "module": facts["module"],
        "fate": facts["fate"],
        "bytes": size(facts["bytes"]) if facts["bytes"] else "",
        "time": duration(facts["seconds"]) if facts["seconds"] else "",
        "runs": str(facts["recomputed"] + 1) if facts["recomputed"] else "",
    }
    told = "".join(f"{key}: {_escaped(value)}\\l" for key, value in rows.items() if value)
    operator = _escaped(facts["operator"].removesuffix(".default") or kind)
    return f"{{{_escaped(name)}|op_code={kind}\\l|{operator}\\l{told}}}"


def _source(facts: dict[str, Any]) -> str:
    return f', tooltip="{_escaped(facts["source"])}"' if facts["source"] else ""


def _escaped(text: str) -> str:
    return text.translate(_ESCAPED)

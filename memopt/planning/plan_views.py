"""A plan as a directed graph for networkx, as a page, as pictures, and in files of other tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import is_view, storage_bytes
from memopt.planning.changes import source_line
from memopt.planning.frontier import Frontier, shown
from memopt.planning.schedule_parts import forward_evaluations, held_storages
from memopt.solver import Schedule
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from networkx import DiGraph

    from memopt.planning.cards import OnCard
    from memopt.planning.joined import Joined
    from memopt.planning.priced_step import TracedStep


def joint_digraph(captured: TracedStep, joined: Joined, schedule: Schedule) -> DiGraph:
    """The joint graphs of all regions as one directed graph: see `Plan.networkx`."""
    from networkx import DiGraph  # slow to import, and seldom asked for

    graph = DiGraph()
    several = len(captured.regions) > 1
    for number, region in enumerate(captured.regions):
        _add_region(graph, number, region, prefix=f"{number}." if several else "")
    attributes = zip(joined.owner, op_names(captured, joined), _op_attributes(joined, schedule), strict=True)
    for (owner, local), name, decided in attributes:
        if name not in graph:  # an op of the account only, which no node of the captured graph stands for
            half = "forward" if local < joined.prices[owner].problem.forward_ops else "backward"
            graph.add_node(name, **{**_BLANK, "region": owner, "kind": "account", "half": half})
        graph.nodes[name].update(decided)
    return graph


def op_names(captured: TracedStep, joined: Joined) -> Iterator[str]:
    """For each op of the problem, the name of its node in the directed graph that `joint_digraph` makes."""
    several = len(captured.regions) > 1
    for owner, local in joined.owner:
        priced = joined.prices[owner]
        yield (f"{owner}." if several else "") + (priced.nodes[local] or priced.problem.ops[local].name)


def named_nodes(captured: TracedStep) -> Iterator[tuple[str, int, fx.Node]]:
    """The nodes of all joint graphs, each with its name in the directed graph that `joint_digraph` makes, and with the
    number of its region."""
    several = len(captured.regions) > 1
    for number, region in enumerate(captured.regions):
        for node in region.module.graph.nodes:
            yield f"{number}." * several + node.name, number, node


_BLANK: dict[str, Any] = {
    "region": 0,
    "kind": "",
    "operator": "",
    "half": "",
    "module": "",
    "source": None,
    "fate": "temporary",
    "bytes": 0,
    "seconds": 0.0,
    "recomputed": 0,
    "held_bytes": 0,
    "offloaded_bytes": 0,
}


def _add_region(graph: DiGraph, number: int, region: JointGraph, prefix: str) -> None:
    """Add the nodes of one captured joint graph, unpriced, and an edge from each node to those that read it."""
    late = backward_nodes(region.module.graph)
    for node in region.module.graph.nodes:
        if node.op == "output":
            continue
        half = "input" if node.op in ("placeholder", "get_attr") else "backward" if node in late else "forward"
        value = node.meta.get("val")
        given = half == "input" and isinstance(value, Tensor) and not is_tangent(node)
        graph.add_node(
            prefix + node.name,
            **{
                **_BLANK,
                "region": number,
                "kind": node.op,
                "operator": "" if half == "input" else str(node.target),
                "half": half,
                "module": module_path(node),
                "source": source_line(node) or None,
                "fate": _unpriced_fate(node, region),
                "bytes": storage_bytes(value) if given else 0,
            },
        )
        graph.add_edges_from((prefix + read.name, prefix + node.name) for read in node.all_input_nodes)


def _unpriced_fate(node: fx.Node, region: JointGraph) -> str:
    """The fate of a node that makes no memory by itself."""
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node in region.fused_away:
        return "fused"
    return "alias" if is_view(node) or "getitem" in str(node.target) else "temporary"


def _op_attributes(joined: Joined, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """For each op of the problem, the attributes that the schedule decides."""
    problem = joined.problem
    boundary = forward_evaluations(problem, schedule)
    held = set(held_storages(problem, schedule))
    last_read = {storage for index in schedule.evaluations[boundary:] for storage in problem.ops[index].reads}
    moved = Counter(offload.storage for offload in schedule.offloads)
    repeated = schedule.recomputed()
    for index, op in enumerate(problem.ops):
        saved = [storage for storage in op.makes if storage in held]
        attributes: dict[str, Any] = {
            "bytes": sum(problem.storages[storage].bytes for storage in op.makes),
            "seconds": op.seconds,
            "recomputed": repeated.get(index, 0),
            "held_bytes": sum(problem.storages[storage].bytes for storage in saved),
            "offloaded_bytes": sum(problem.storages[storage].bytes * moved[storage] for storage in op.makes),
        }
        kept = any(problem.storages[storage].kept for storage in op.makes)
        if op.is_receipt and index >= problem.forward_ops - 1 and kept:
            fate = "input"  # the gradient of an output, which comes from outside
        elif attributes["offloaded_bytes"]:
            fate = "offloaded"
        elif attributes["recomputed"]:
            fate = "recomputed"
        elif kept:
            fate = "output" if index < problem.forward_ops else "gradient"
        elif last_read.intersection(saved):
            fate = "saved"
        else:
            fate = "temporary"
        yield {**attributes, "fate": fate}


Format = Literal["snapshot", "trace", "dot"]
"""The formats of `Plan.export`."""


class PlanViews:
    """Base class of `Plan` with its ways of being shown: page, pictures, explanation and files of other tools."""

    def report(self, path: str | Path, *, frontier: Frontier[Any] | None = None, cards: Sequence[OnCard] = ()) -> None:
        """Write the plan as one HTML page that needs no network: the budget, memory over the step, bytes by module,
        what the plan changes, precision, and all operators, with a search over all of it.

        Args:
            path: a file named *.html.
            frontier: what `Plan.frontier` returned, to be drawn on the page.
            cards: what `Plan.cards` returned, to be shown as a table.

        The page of a plan that was loaded from a file shows the budget only. Raises `ValueError` for a path that does
        not end in .html.
        """
        shown("page").report(self, path, frontier, cards)

    def explain(self, op: str | None = None) -> str:
        """Explain as text where the bytes go, and which of the largest values are saved, recomputed or offloaded. With
        `op`, explain one operator: its line of code, dtype, bytes, time, whether it is saved or recomputed, and why.

        Args:
            op: a name that the tables show, or a part of an operator's or a module's name, such as "mlp.c_fc". If
                several match, they are listed, and the one whose forward takes longest is explained.

        Raises `ValueError` if no operator matches, or if the plan was loaded from a file.
        """
        return shown("op_story").explain(self, op)

    def export(self, path: str | Path, format: Format | None = None) -> None:
        """Write the step into a file of another tool's format.

        Args:
            path: the file; without `format`, the end of its name says which.
            format: "snapshot" (.pickle) for pytorch.org/memory_viz; "trace" (.json) for ui.perfetto.dev and
                chrome://tracing; "dot" (.dot) for Graphviz and Netron: the joint graph, each node with its
                fate (saved, recomputed, offloaded, …).

        Raises `ValueError` for another format, and for a plan that was loaded from a file.
        """
        shown("exports").export(self, path, format)

    def plot_timeline(self, path: str | Path | None = None) -> Figure:
        """Draw the memory over the step, as planned and with nothing recomputed, as a matplotlib figure; with `path`
        into a file too: .svg, .png or .pdf.

        Raises `ModuleNotFoundError` without matplotlib (`pip install 'memopt[picture]'`), `ValueError` for another kind
        of file, and for a plan that was loaded from a file.
        """
        return shown("pictures").timeline(self, path)

    def plot_treemap(self, path: str | Path | None = None, *, planned: bool = True) -> Figure:
        """Draw the bytes of each module at the peak, as planned or (`planned=False`) with nothing recomputed. Writes
        and raises as `plot_timeline`."""
        return shown("pictures").treemap(self, path, planned=planned)

    def _repr_html_(self) -> str:
        """The main part of the page that `report` writes, for notebooks."""
        return shown("bands").notebook(self)

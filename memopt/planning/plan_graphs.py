"""The graphs of a plan's stages, what each stage changed in them, and all that a plan changes in its captured step; and
the captured step as a directed graph for networkx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import is_view, storage_bytes
from memopt.planning.changes import OFFLOADED, RECOMPUTED, Change, source_line
from memopt.planning.frontier import shown
from memopt.planning.schedule_parts import RegionSchedule, forward_evaluations, held_storages, scheduled_graph
from memopt.solver import Schedule
from memopt.terminal import Console, ConsoleOptions, RenderResult, Text
from passes import GraphDiff, diff_graphs
from passes.apply_schedule import BACKWARD
from passes.graphs.node_facts import backward_nodes, is_tangent, module_path

if TYPE_CHECKING:
    from networkx import DiGraph

    from memopt.planning.joined import Joined
    from memopt.planning.priced_step import TracedStep


def in_columns(text: str) -> str:
    """HTML that shows `text` in a monospaced font, so that its columns are aligned, whatever font the page sets."""
    return f'<pre style="font-family: ui-monospace, Menlo, Consolas, monospace">{escape(text)}</pre>'


@dataclass(frozen=True)
class StageDiff:
    """The changes that one stage made to the graphs, one `GraphDiff` per region, as text like `git diff`."""

    regions: tuple[GraphDiff, ...]
    recomputed: int = 0
    """How many operators run a second (or further) time."""
    offloaded: int = 0
    """How many values are copied to the host and back."""

    def __bool__(self) -> bool:
        return any(self.regions)

    def summary(self) -> str:
        """The number of recomputed operators and offloaded values; for a stage that has none, what its passes did.

        Views of a recomputed or offloaded value move with it and are not counted."""
        counts = {"recomputed": self.recomputed, "offloaded": self.offloaded}
        if any(counts.values()):
            return ", ".join(f"{count} {fate}" for fate, count in counts.items() if count)
        return "; ".join(dict.fromkeys(region.summary() for region in self.regions if region)) or "no change"

    def __str__(self) -> str:
        return "\n".join(map(str, self.regions))

    def __rich__(self) -> Text:
        colours = {"+": "green", "-": "red", "@": "cyan", "#": "bold"}
        lines = (Text(line, style=colours.get(line[:1], "none")) for line in str(self).splitlines())
        return Text("\n").join(lines)


def stage_graphs(captured: TracedStep, schedules: Sequence[RegionSchedule]) -> dict[str, tuple[fx.GraphModule, ...]]:
    """The graphs of each stage, one module per region: see `Plan.graphs`."""
    pairs = zip(captured.regions, schedules, strict=True)
    joint = {
        "captured": tuple(region.module for region in captured.regions),
        "scheduled": tuple(scheduled_graph(region, schedule) for region, schedule in pairs),
    }
    if not captured.operators:
        return joint
    before, after = (tuple(region.stages[end] for region in captured.operators) for end in (0, -1))
    return {"operators": before, "rewritten": after, **joint}


def stage_diff(captured: TracedStep, schedules: Sequence[RegionSchedule], stage: str, *, order: bool) -> StageDiff:
    """The changes that a stage made to the graphs of all regions (see `Plan.diff`); with `order`, operators that only
    changed their place count, too. Raises `ValueError` for a stage that no region went through."""
    if stage not in ("scheduled", "forward", "backward"):
        return _passes_diff(captured, stage, order=order)
    diffs = []
    for region, schedule in zip(captured.regions, schedules, strict=True):
        before, after = region.module, scheduled_graph(region, schedule)
        among = None if stage == "scheduled" else (_half(before, stage), _half(after, stage))
        diffs.append(diff_graphs(before, after, order=order, among=among))
    recomputed = sum(len(schedule.evaluations) - len(set(schedule.evaluations)) for schedule in schedules)
    offloaded = sum(len(schedule.offloads) for schedule in schedules)
    return StageDiff(tuple(diffs), recomputed, offloaded)


def _half(module: fx.GraphModule, half: str) -> set[fx.Node]:
    """The calls of the forward or of the backward, in a graph that is scheduled or not."""
    late = {node for node in module.graph.nodes if node.meta.get("partitioner_tag") == BACKWARD}
    late = late or set(backward_nodes(module.graph))
    inputs_and_output = ("placeholder", "output")
    return {
        node
        for node in module.graph.nodes
        if node.op not in inputs_and_output and (node in late) == (half == "backward")
    }


def _passes_diff(captured: TracedStep, stage: str, *, order: bool) -> StageDiff:
    """The changes by all passes on operator graphs ("operators") or joint graphs ("joint"), or by one pass."""
    operators = captured.operators
    joint = tuple(region.passes for region in captured.regions if region.passes)
    whole = {"operators": operators, "joint": joint}.get(stage, ())
    if whole:
        return StageDiff(tuple(diff_graphs(region.stages[0], region.stages[-1], order=order) for region in whole))
    graphs = (*operators, *joint)
    spans = [span for graph in graphs if (span := graph.span(stage))]
    if not spans:
        names = ["joint"] * bool(joint) + ["operators"] * bool(operators)
        names += dict.fromkeys(name for graph in graphs for name in graph.names)
        known = "".join(f", {name!r}" for name in names)
        raise ValueError(f"there is no stage {stage!r} to show; give one of 'scheduled', 'forward', 'backward'{known}")
    return StageDiff(tuple(diff_graphs(before, after, notes=why, order=order) for before, after, why in spans))


@dataclass(frozen=True, repr=False)
class PlanDiff:
    """A plan's changes to its captured step, operator by operator; or the changes that only one of two plans makes.
    `str` shows them by module, with like changes of several blocks on one line; rich prints them in colours."""

    title: str
    changes: tuple[Change, ...]
    modules: tuple[str, ...]
    """The paths of the model's modules, in the order of the forward."""
    of_stage: Callable[[str], StageDiff] = field(compare=False)

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def recomputed(self) -> int:
        """How many operators run a second (or further) time."""
        return sum(change.times for change in self.changes if change.kind == RECOMPUTED)

    @property
    def offloaded(self) -> int:
        """How many values are copied to the host and back."""
        return sum(change.times for change in self.changes if change.kind == OFFLOADED)

    def summary(self) -> str:
        """The numbers of recomputed operators and of offloaded values, or, if both are 0, of the other changes."""
        return shown("diff_text").summary(self.changes)

    def text(self, stage: str = "scheduled") -> str:
        """The changes of one stage line by line, like the text of `git diff`. `stage` is a stage name of `Plan.diff`,
        or, if this compares two plans, of `Plan.graphs`. Raises `ValueError` for another name."""
        return str(self.of_stage(stage))

    def show(self, console: Console | None = None) -> None:
        """Print the changes; on a terminal in colours, and as wide as its window."""
        (console or Console()).print(self)

    def __str__(self) -> str:
        return str(shown("diff_text").render(self._heading(), self.changes, self.modules))

    def _repr_html_(self) -> str:
        """The changes, for notebooks."""
        return in_columns(str(self))

    def __repr__(self) -> str:
        return f"<PlanDiff: {self.summary()}>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield shown("diff_text").render(self._heading(), self.changes, self.modules, options.max_width)

    def _heading(self) -> str:
        return f"{self.title}: {shown('diff_text').totals(self.changes)}"


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
    """The nodes of all joint graphs, each with its name in `joint_digraph`, and the number of its region."""
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

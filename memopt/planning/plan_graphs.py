"""The graphs of a plan's stages, what each stage changed in them, and all that a plan changes in its captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from torch import fx

from memopt.planning.changes import OFFLOADED, RECOMPUTED, Change
from memopt.planning.frontier import shown
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph
from memopt.terminal import Console, ConsoleOptions, RenderResult, Text
from passes import GraphDiff, diff_graphs
from passes.apply_schedule import BACKWARD
from passes.graphs.node_facts import backward_nodes

if TYPE_CHECKING:
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
    """What a plan changes in its captured step, operator by operator; or the changes that only one of two plans makes.
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

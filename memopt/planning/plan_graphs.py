"""The graphs of a plan's stages, and what each stage changed in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from memopt.planning.region_schedule import RegionSchedule, scheduled_graph
from passes import GraphDiff, diff_graphs

if TYPE_CHECKING:
    from memopt.planning.captured import Captured


@dataclass(frozen=True)
class PlanDiff:
    """The changes of a plan to the captured graphs: one `GraphDiff` per region. `str` gives the text of all of them."""

    regions: tuple[GraphDiff, ...]
    recomputed: int = 0
    """How many operators run a second (or further) time."""
    offloaded: int = 0
    """How many values are copied to the host and back."""

    def __bool__(self) -> bool:
        return any(self.regions)

    def summary(self) -> str:
        """The number of recomputed operators and offloaded values; for a stage that has none, what its passes did.

        Views of a recomputed or offloaded value move with it and are not counted.
        """
        counts = {"recomputed": self.recomputed, "offloaded": self.offloaded}
        if any(counts.values()):
            return ", ".join(f"{count} {fate}" for fate, count in counts.items() if count)
        return "; ".join(dict.fromkeys(region.summary() for region in self.regions if region)) or "no change"

    def __str__(self) -> str:
        return "\n".join(map(str, self.regions))


def stage_graphs(captured: Captured, schedules: Sequence[RegionSchedule]) -> dict[str, tuple[fx.GraphModule, ...]]:
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


def schedule_diff(captured: Captured, schedules: Sequence[RegionSchedule]) -> PlanDiff:
    """The nodes that scheduling added to the joint graphs: recomputed nodes and copies to and from the host."""
    graphs = stage_graphs(captured, schedules)
    recomputed = sum(len(schedule.evaluations) - len(set(schedule.evaluations)) for schedule in schedules)
    offloaded = sum(len(schedule.offloads) for schedule in schedules)
    return PlanDiff(tuple(map(diff_graphs, graphs["captured"], graphs["scheduled"])), recomputed, offloaded)


def passes_diff(captured: Captured, stage: str) -> PlanDiff:
    """The changes that passes made: all of them on the operator graphs ("operators"), or one pass or labelled pipeline,
    on the operator graphs or the joint graphs.

    Raises `ValueError` for a stage that no region went through.
    """
    operators = captured.operators
    if stage == "operators" and operators:
        return PlanDiff(tuple(diff_graphs(region.stages[0], region.stages[-1]) for region in operators))
    graphs = (*operators, *(region.passes for region in captured.regions if region.passes))
    spans = [(*span, graph.reasons(stage)) for graph in graphs if (span := graph.span(stage))]
    if not spans:
        names = ["operators"] * bool(operators) + list(dict.fromkeys(name for graph in graphs for name in graph.names))
        known = "".join(f", {name!r}" for name in names)
        raise ValueError(f"no stage {stage!r} to show; there is 'scheduled', against 'captured'{known}")
    return PlanDiff(tuple(diff_graphs(before, after, notes=reasons) for before, after, reasons in spans))

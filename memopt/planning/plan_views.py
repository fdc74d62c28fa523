"""What a plan shows of its step: the page, pictures, and files for other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.plan_diff import PlanDiff
from memopt.show.diff_sections import diff_sections
from memopt.show.drawing import write_figure
from memopt.show.exports import Format, write_export
from memopt.show.figures import PlanFigures
from memopt.show.page.data import PageFigures
from memopt.show.page.heart import heart
from memopt.show.page.page import write_page
from memopt.show.step import Step
from memopt.show.timeline_picture import timeline_figure
from memopt.show.treemap_picture import treemap_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from networkx import DiGraph


class ViewedPlan(PlanFigures, Protocol):
    """What the views read of a plan."""

    @property
    def source(self) -> Any | None:
        """None for a plan that was loaded, which has no graphs."""

    def diff(self) -> PlanDiff:
        """The changes that the plan makes."""

    def recipes(self) -> Sequence[Recipe]:
        """Checkpointing by hand on the same step."""

    def networkx(self) -> DiGraph:
        """The captured joint graph with the fate of each node."""

    def _step(self) -> Step:
        """Everything that the step holds at every moment."""


class PlanViews:
    """The views of a plan, for `Plan` to derive from."""

    def report(self: ViewedPlan, path: str | Path, *, frontier: Frontier[Any] | None = None) -> None:
        """Write the plan as one HTML page that needs no network: the budget, memory over the step, bytes by module,
        what the plan changes, precision, and all operators, with a search over all of it.

        Args:
            path: a file named *.html.
            frontier: the curve that `frontier` returned, to be shown beside the plan.

        A plan that was loaded has no graphs, and its page the budget only. Raises `ValueError` for another name.
        """
        if self.source is None:
            write_page(Path(path), PageFigures(self, frontier=frontier))
            return
        diff = self.diff()
        sections = diff_sections(diff.changes, diff.modules)
        write_page(Path(path), PageFigures(self, self._step(), sections, self.recipes(), frontier))

    def export(self: ViewedPlan, path: str | Path, format: Format | None = None) -> None:
        """Write the step into a file of another tool's format.

        Args:
            path: the file; without `format`, the end of its name says which.
            format: "snapshot" (.pickle) for pytorch.org/memory_viz; "trace" (.json) for ui.perfetto.dev and
                chrome://tracing; "dot" (.dot) for Graphviz and Netron: the joint graph with the fate of each node.

        Raises `ValueError` for another format, or if loaded.
        """
        write_export(Path(path), format, self._step, self.networkx)

    def plot_timeline(self: ViewedPlan, path: str | Path | None = None) -> Figure:
        """Draw the memory over the step, as planned and with nothing recomputed, as a matplotlib figure; with `path`
        into a file too: .svg, .png or .pdf.

        Raises `ModuleNotFoundError` without matplotlib (`pip install 'memopt[picture]'`), `ValueError` for another kind
        of file, or if loaded.
        """
        return _drawn(lambda: timeline_figure(self, self._step()), path)

    def plot_treemap(self: ViewedPlan, path: str | Path | None = None, *, planned: bool = True) -> Figure:
        """Draw the bytes of each module at the peak, as planned or (`planned=False`) with nothing recomputed. Writes
        and raises as `plot_timeline`."""
        step = self._step()
        return _drawn(lambda: treemap_figure(self, step, step.planned if planned else step.plain), path)

    def _repr_html_(self: ViewedPlan) -> str:
        """The heart of the page, for notebooks."""
        return heart(self, None if self.source is None else self._step())


def _drawn(draw: Callable[[], Figure], path: str | Path | None) -> Figure:
    return draw() if path is None else write_figure(draw, Path(path))

"""What a plan shows of its step: the page, pictures, and files for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memopt.planning.frontier import Frontier
from memopt.planning.shown import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Format = Literal["snapshot", "trace", "dot"]
"""The formats of `Plan.export`."""


class PlanViews:
    """The views of a plan, for `Plan` to derive from."""

    def report(self, path: str | Path, *, frontier: Frontier[Any] | None = None) -> None:
        """Write the plan as one HTML page that needs no network: the budget, memory over the step, bytes by module,
        what the plan changes, precision, and all operators, with a search over all of it.

        Args:
            path: a file named *.html.
            frontier: the curve that `frontier` returned, to be shown beside the plan.

        A plan that was loaded has no graphs, and its page the budget only. Raises `ValueError` for another name.
        """
        shown("views").write_report(self, Path(path), frontier)

    def export(self, path: str | Path, format: Format | None = None) -> None:
        """Write the step into a file of another tool's format.

        Args:
            path: the file; without `format`, the end of its name says which.
            format: "snapshot" (.pickle) for pytorch.org/memory_viz; "trace" (.json) for ui.perfetto.dev and
                chrome://tracing; "dot" (.dot) for Graphviz and Netron: the joint graph with the fate of each node.

        Raises `ValueError` for another format, or if loaded.
        """
        shown("views").export(self, Path(path), format)

    def plot_timeline(self, path: str | Path | None = None) -> Figure:
        """Draw the memory over the step, as planned and with nothing recomputed, as a matplotlib figure; with `path`
        into a file too: .svg, .png or .pdf.

        Raises `ModuleNotFoundError` without matplotlib (`pip install 'memopt[picture]'`), `ValueError` for another kind
        of file, or if loaded.
        """
        return shown("views").timeline(self, path)

    def plot_treemap(self, path: str | Path | None = None, *, planned: bool = True) -> Figure:
        """Draw the bytes of each module at the peak, as planned or (`planned=False`) with nothing recomputed. Writes
        and raises as `plot_timeline`."""
        return shown("views").treemap(self, path, planned=planned)

    def _repr_html_(self) -> str:
        """The heart of the page, for notebooks."""
        return shown("views").notebook(self)

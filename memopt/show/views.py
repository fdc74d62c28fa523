"""The page, the pictures and the files of a plan: see the methods of `memopt.Plan`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.planning.frontier import Frontier
from memopt.planning.plan import Plan
from memopt.planning.plan_views import Format
from memopt.show.diff_sections import diff_sections
from memopt.show.drawing import write_figure
from memopt.show.exports.write import write_export
from memopt.show.page.data import PageFigures
from memopt.show.page.heart import heart
from memopt.show.page.page import write_page
from memopt.show.step_of_plan import step_of
from memopt.show.timeline_picture import timeline_figure
from memopt.show.treemap_picture import treemap_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(plan: Plan, path: Path, frontier: Frontier[Any] | None) -> None:
    """`Plan.report`: the page, or its budget only of a plan without graphs."""
    if plan.source is None:
        write_page(path, PageFigures(plan, frontier=frontier))
        return
    diff = plan.diff()
    sections = diff_sections(diff.changes, diff.modules)
    write_page(path, PageFigures(plan, step_of(plan), sections, plan.recipes(), frontier))


def export(plan: Plan, path: Path, format: Format | None) -> None:
    """`Plan.export`."""
    write_export(path, format, lambda: step_of(plan), plan.networkx)


def timeline(plan: Plan, path: str | Path | None) -> Figure:
    """`Plan.plot_timeline`."""
    return _drawn(lambda: timeline_figure(plan, step_of(plan)), path)


def treemap(plan: Plan, path: str | Path | None, *, planned: bool) -> Figure:
    """`Plan.plot_treemap`."""
    step = step_of(plan)
    return _drawn(lambda: treemap_figure(plan, step, step.planned if planned else step.plain), path)


def notebook(plan: Plan) -> str:
    """The heart of the page."""
    return heart(plan, None if plan.source is None else step_of(plan))


def _drawn(draw: Callable[[], Figure], path: str | Path | None) -> Figure:
    return draw() if path is None else write_figure(draw, Path(path))

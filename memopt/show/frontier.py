"""A frontier as text and as a picture: the curve of peaks and added times, its bound, and recipes beside it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memopt.errors import GIB
from memopt.planning.frontier import Frontier, FrontierPoint, Recipe
from memopt.show.drawing import QUIET, Label, drawn, mark, new_figure, place, quiet_frame
from memopt.show.report import as_text, new_table
from memopt.terminal import RenderableType, Table
from memopt.units import duration, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = 16
_CURVE, _RECIPE, _SHADE = "#1f5fa8", "#c4532d", "#ececec"
_FONT = 9.0
_SHORT = {"per block": "1", "sqrt(L) segments": "√L"}
_TOUCH_PIXELS = 16.0  # distance between the centres of two dots below which they share a label


def render(frontier: Frontier, width: int = 110) -> str:
    """A headline, the curve and the recipes (such as a checkpoint at every block), as text of `width` columns."""
    return as_text(*parts(frontier), width=width)


def parts(frontier: Frontier) -> list[RenderableType]:
    """The sentences and rich tables that `render` shows."""
    notes = (f"note: {note}" for note in frontier.notes)
    return [_headline(frontier), _curve_table(frontier), _recipe_table(frontier), *notes]


def _headline(frontier: Frontier) -> str:
    ends = frontier.plain_gb, frontier.smallest_gb, frontier.floor_gb
    plain, smallest, floor = (size(round(gb * GIB)) for gb in ends)
    return (
        f"{frontier.model}, planned for {frontier.hardware}: from {plain} with nothing recomputed down to {smallest} "
        f"(no schedule that keeps the order of operators holds less than {floor}), added time as a share of "
        f"{duration(frontier.step_seconds)}"
    )


def _curve_table(frontier: Frontier) -> Table:
    right = ("budget", "peak", "added time", "at least", "runs of an op")
    table, shown = new_table("The least added time for each budget", right=right), _sizes(frontier)
    table.add_column("method")
    for point in spread(frontier.points):
        table.add_row(
            shown(point.budget_gb),
            shown(point.peak_gb),
            f"{point.added_time:.1%}",
            f"{point.bound:.1%}",
            f"up to {point.evaluations}" if point.evaluations > 1 else "1",
            point.method,
        )
    return table


def _recipe_table(frontier: Frontier) -> Table:
    table = new_table("Recipes, and memopt within the same peak", "recipe", right=("peak", "added time", "memopt"))
    shown = _sizes(frontier)
    for recipe in frontier.recipes:
        ours = frontier.at(recipe.peak_gb).added_time
        table.add_row(recipe.name, shown(recipe.peak_gb), f"{recipe.added_time:.1%}", f"{ours:.1%}")
    return table


def spread(points: Sequence[FrontierPoint], most: int = ROWS) -> Sequence[FrontierPoint]:
    """At most `most` of the points: both ends, and points at even distances between them along the drawn curve."""
    if len(points) <= most:
        return points
    width = points[-1].budget_gb - points[0].budget_gb
    height = points[0].added_time - points[-1].added_time or 1.0
    steps = pairwise(points)
    lengths = [(b.budget_gb - a.budget_gb) / width + (a.added_time - b.added_time) / height for a, b in steps]
    along = list(accumulate(lengths, initial=0.0))
    wanted = (along[-1] * number / (most - 1) for number in range(most))
    chosen = {min(range(len(points)), key=lambda index: abs(along[index] - place)) for place in wanted}
    return tuple(points[index] for index in sorted(chosen))


def _unit_of(frontier: Frontier) -> tuple[str, float]:
    """The unit in which all sizes of the curve are shown, "GB" or "MB", and how many of it make a GB."""
    return ("GB", 1.0) if frontier.plain_gb >= 1 else ("MB", 1024.0)


def _sizes(frontier: Frontier) -> Callable[[float], str]:
    """A function that formats GB in the curve's unit, with enough digits to tell its points apart."""
    unit, scale = _unit_of(frontier)
    width = (frontier.plain_gb - frontier.smallest_gb) * scale
    digits = max(3 - math.floor(math.log10(width)), 0) if width else 3
    return lambda gb: f"{gb * scale:,.{digits}f} {unit}"


def draw(frontier: Frontier, path: Path) -> None:
    """Draw the curve into a file. Raises `ValueError` for a file name that is not of a picture."""
    drawn(lambda: figure_of(frontier), path)


def as_svg(frontier: Frontier) -> str | None:
    """The curve of added time over the budget as SVG text; None without matplotlib."""
    page = io.StringIO()
    try:
        figure_of(frontier).savefig(page, format="svg")
    except ModuleNotFoundError:
        return None
    return page.getvalue()


def figure_of(frontier: Frontier) -> Figure:
    """The curve of added time over the budget. Raises `ModuleNotFoundError` without matplotlib."""
    figure, axes = new_figure(8.0, 5.0, left=0.085, right=0.97, bottom=0.11, top=0.83)
    unit, scale = _unit_of(frontier)
    _frame(figure, axes, frontier, unit, scale)
    _ends(axes, frontier, scale)
    curve = [(point.peak_gb * scale, 100 * point.added_time) for point in frontier.points]
    axes.plot(
        *zip(*curve, strict=True), color=_CURVE, linewidth=2.0, marker="o", markersize=3.0, clip_on=False, zorder=4
    )
    labels = [Label("memopt", *curve[len(curve) // 3], _CURVE, bold=True), *_recipes(axes, frontier, scale)]
    dots = [_spot(recipe, scale) for recipe in frontier.recipes]
    place(figure, axes, [*_bound(figure, axes, frontier, scale), *labels], curve, dots, _FONT)
    return figure


def _frame(figure: Figure, axes: Axes, frontier: Frontier, unit: str, scale: float) -> None:
    """Draw titles and axes, with units and ranges."""
    step = duration(frontier.step_seconds)
    figure.text(0.085, 0.945, f"{frontier.model} on {frontier.hardware}", fontsize=13, fontweight="bold")
    figure.text(0.085, 0.9, f"what less memory costs a training step of {step}", fontsize=10, color=QUIET)
    axes.set_xlabel(f"peak memory of the training step, {unit}", fontsize=10)
    axes.set_ylabel("added time, % of the step", fontsize=10)
    peaks = [*(recipe.peak_gb for recipe in frontier.recipes), frontier.plain_gb, frontier.smallest_gb]
    times = [*(recipe.added_time for recipe in frontier.recipes), frontier.points[0].added_time]
    margin = 0.03 * ((max(peaks) - min(peaks)) or 0.1 * max(peaks))
    axes.set_xlim((min(peaks) - margin) * scale, (max(peaks) + margin) * scale)
    axes.set_ylim(0.0, 112 * max(times) or 1.0)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    quiet_frame(axes, _FONT)


def _ends(axes: Axes, frontier: Frontier, scale: float) -> None:
    """Draw vertical lines at the smallest peak and at that with nothing recomputed, with their names above."""
    for gb, name, side in (
        (frontier.smallest_gb, "smallest", "left"),
        (frontier.plain_gb, "nothing recomputed", "right"),
    ):
        told = f"{name}: {_sizes(frontier)(gb)}"
        mark(axes, gb * scale, told, side, _FONT, 1.015, linewidth=0.8, linestyle=(0, (4, 3)))


def _bound(figure: Figure, axes: Axes, frontier: Frontier, scale: float) -> list[Label]:
    """Shade the area below the bound, and name it inside if there is room; else return a label for it."""
    x = [point.budget_gb * scale for point in frontier.points]
    y = [100 * point.bound for point in frontier.points]
    axes.fill_between(x, y, color=_SHADE, linewidth=0, zorder=1)
    axes.plot(x, y, color="#b5b5b5", linewidth=0.8, zorder=2)
    text = axes.text(0, 0, "no schedule can be here", fontsize=_FONT, color=QUIET, verticalalignment="center")
    renderer: Any = figure.canvas
    box = text.get_window_extent(renderer.get_renderer()).transformed(axes.transData.inverted())
    left = x[0] + 0.02 * (x[-1] - x[0])
    above = [height for place, height in zip(x, y, strict=True) if place <= left + box.width]
    if above[-1] > 1.5 * box.height:
        text.set_position((left, above[-1] / 2))
        return []
    text.remove()
    return [Label("no schedule below", x[len(x) // 2], y[len(y) // 2], QUIET)]


def _recipes(axes: Axes, frontier: Frontier, scale: float) -> list[Label]:
    """Draw a dot for each recipe that recomputes anything; returns labels, one for several dots that touch."""

    def apart(one: Recipe, other: Recipe) -> float:
        return math.dist(*(axes.transData.transform(_spot(recipe, scale)) for recipe in (one, other)))

    together: list[list[Recipe]] = []
    for recipe in sorted(frontier.recipes, key=lambda recipe: recipe.peak_gb):
        if recipe.added_time > 0:
            axes.plot(*_spot(recipe, scale), color=_RECIPE, marker="o", markersize=5.0, zorder=5, clip_on=False)
            touched = (group for group in together if any(apart(recipe, other) < _TOUCH_PIXELS for other in group))
            if (group := next(touched, None)) is None:
                together.append(group := [])
            group.append(recipe)
    labels = [Label(named(group), *_spot(group[-1], scale), _RECIPE) for group in together]
    numbered = [label for label in labels if label.text[0].isdigit()]
    if numbered:
        last = max(numbered, key=lambda label: label.x)
        labels.append(replace(last, text="checkpoints every k blocks, k = 1, 2, …"))
    return labels


def named(recipes: Iterable[Recipe]) -> str:
    """The names of several recipes as one short label, such as "1, 2, √L": "every k blocks" becomes the number k, and
    "per block" becomes 1."""
    names = [_SHORT.get(recipe.name, recipe.name) for recipe in recipes]
    numbers = [name.split()[1] if name.startswith("every ") and name.endswith(" blocks") else name for name in names]
    return ", ".join(sorted(numbers, key=lambda name: (not name.isdigit(), int(name) if name.isdigit() else 0, name)))


def _spot(recipe: Recipe, scale: float) -> tuple[float, float]:
    return recipe.peak_gb * scale, 100 * recipe.added_time

"""The tables of a frontier, as plain text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from rich.console import RenderableType
from rich.table import Table

from memopt.errors import GIB
from memopt.planning.frontier import Frontier, FrontierPoint
from memopt.show.report import as_text
from memopt.units import duration, size

ROWS = 16


def render(frontier: Frontier, width: int = 110) -> str:
    """A headline, the curve, and the recipes beside it, as text of `width` columns."""
    return as_text(*parts(frontier), width=width)


def parts(frontier: Frontier) -> list[RenderableType]:
    """What `render` shows, as sentences and rich tables."""
    notes = (f"note: {note}" for note in frontier.notes)
    return [_headline(frontier), _curve_table(frontier), _recipe_table(frontier), *notes]


def _headline(frontier: Frontier) -> str:
    plain, smallest, floor = (
        size(round(gb * GIB)) for gb in (frontier.plain_gb, frontier.smallest_gb, frontier.floor_gb)
    )
    return (
        f"{frontier.model}, planned for {frontier.hardware}: from {plain} with nothing recomputed down to {smallest} "
        f"(no schedule in this order holds less than {floor}), added time as a share of "
        f"{duration(frontier.step_seconds)}"
    )


def _curve_table(frontier: Frontier) -> Table:
    table = Table(title="The least added time for each budget", title_justify="left")
    shown = sizes(frontier)
    for title in ("budget", "peak", "added time", "at least", "runs of an op"):
        table.add_column(title, justify="right")
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
    table = Table(title="Recipes, and memopt within the same peak", title_justify="left")
    table.add_column("recipe")
    for title in ("peak", "added time", "memopt"):
        table.add_column(title, justify="right")
    shown = sizes(frontier)
    for recipe in frontier.recipes:
        ours = frontier.at(recipe.peak_gb).added_time
        table.add_row(recipe.name, shown(recipe.peak_gb), f"{recipe.added_time:.1%}", f"{ours:.1%}")
    return table


def spread(points: Sequence[FrontierPoint], most: int = ROWS) -> Sequence[FrontierPoint]:
    """At most `most` of the points, with both ends, at even distances along the curve as a picture shows it."""
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


def unit_of(frontier: Frontier) -> tuple[str, float]:
    """The unit of all sizes of the curve, "GB" or "MB", and how many of it make a GB."""
    return ("GB", 1.0) if frontier.plain_gb >= 1 else ("MB", 1024.0)


def sizes(frontier: Frontier) -> Callable[[float], str]:
    """A function that formats GB in the curve's unit, with enough digits to tell its points apart."""
    unit, scale = unit_of(frontier)
    width = (frontier.plain_gb - frontier.smallest_gb) * scale
    digits = max(3 - math.floor(math.log10(width)), 0) if width else 3
    return lambda gb: f"{gb * scale:,.{digits}f} {unit}"

"""Figures of matplotlib, which is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png", ".pdf")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, which pyplot knows nothing of. Raises `ModuleNotFoundError`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures are drawn with matplotlib, which is not installed; pip install 'memopt[picture]'", name=error.name
        ) from error

    figure = Figure(figsize=(width, height), dpi=160)
    FigureCanvasAgg(figure)  # needed to measure texts
    return figure


def write_figure(draw: Callable[[], Figure], path: Path) -> Figure:
    """Draw a figure, and write it to a file. Raises `ValueError` for other `KINDS` of files."""
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"a picture is a file named *{', *'.join(KINDS)}, not {path.name!r}")
    figure = draw()
    figure.savefig(path)
    return figure

"""Figures of matplotlib, which is loaded when one is drawn, and labels in them that are placed clear of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUIET = "#6b6b6b"
"""The colour of axes and of remarks."""
_KINDS = (".svg", ".png", ".pdf")
Point = tuple[float, ...]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""
# Distances from a point at which its label is tried, in multiples of the label's height.
_DISTANCES = (0.9, 1.7, 2.7, 4.0, 5.5, 7.5, 10.0)
# Directions from the point, in degrees, the preferred first.
_DIRECTIONS = (90, 45, 0, -90, -45, 135, 20, 70, 110, 180, -20, -135, 160, -160)
_LEADS = 1.5  # labels further away than this, in multiples of their height, get a line to their point
_DOT = 8.0  # radius of a dot, in pixels
_PADDING = 0.4  # space around a label, in multiples of its height
_NEARER = 1.4  # a label without a line is nearer to its own point than to any other, by this factor


def new_figure(width: float, height: float, **margins: float) -> tuple[Figure, Axes]:
    """An empty matplotlib figure of this size in inches, and its axes. Raises `ModuleNotFoundError` without it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "pictures are drawn with matplotlib, which is not installed; pip install 'memopt[picture]'", name=error.name
        ) from error

    figure = Figure(figsize=(width, height), dpi=160)
    FigureCanvasAgg(figure)  # needed to measure texts
    figure.subplots_adjust(**margins)
    return figure, figure.subplots()


def quiet_frame(axes: Axes, font_size: float) -> None:
    """Remove the top and right sides of the axes' frame, and draw the rest, with short ticks, in grey."""
    axes.tick_params(length=3, color=QUIET, labelsize=font_size)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)


def mark(axes: Axes, x: float, name: str, side: str, size: float, height: float, **line: Any) -> None:
    """Draw a vertical line at `x` in the style `line`, with its name at `height` (1 is the top of the frame)."""
    axes.axvline(x, color=QUIET, **line)
    axes.text(
        x, height, name, transform=axes.get_xaxis_transform(), fontsize=size, color=QUIET, horizontalalignment=side,
        verticalalignment="bottom",
    )  # fmt: skip


def drawn(draw: Callable[[], Figure], path: str | Path | None) -> Figure:
    """The figure that `draw` makes, also written to `path` if given. Raises `ValueError` for a name not of `_KINDS`."""
    if path is not None and Path(path).suffix.lower() not in _KINDS:
        raise ValueError(f"a picture is a file named *{', *'.join(_KINDS)}, not {Path(path).name!r}")
    figure = draw()
    if path is not None:
        figure.savefig(path)
    return figure


@dataclass(frozen=True)
class Label:
    """A text and the point that it names, in the units of the axes."""

    text: str
    x: float
    y: float
    color: str
    bold: bool = False


def place(
    figure: Figure, axes: Axes, labels: Sequence[Label], line: Sequence[Point], dots: Sequence[Point], font_size: float
) -> None:
    """Draw each label at the nearest free position, or where it covers the least of `line` and `dots`, the points of
    the curve and of the dots, in the units of the axes."""
    from matplotlib.patheffects import withStroke

    canvas: Any = figure.canvas
    renderer = canvas.get_renderer()
    to_pixels, to_data = axes.transData, axes.transData.inverted()
    points = [tuple(to_pixels.transform((label.x, label.y))) for label in labels]
    frame = axes.get_window_extent(renderer)
    room = _Room((frame.x0, frame.y0, frame.x1, frame.y1), points)
    segments = pairwise(tuple(to_pixels.transform(point)) for point in line)
    room.drawn += [_around(x, y, 5.0) for a, b in segments for x, y in _along(a, b)]
    room.drawn += [_around(x, y, _DOT) for x, y in map(to_pixels.transform, dots)]
    for label, point in zip(labels, points, strict=True):
        weight = "bold" if label.bold else "normal"
        text = axes.text(label.x, label.y, label.text, fontsize=font_size, color=label.color, fontweight=weight)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        extent = text.get_window_extent(renderer)
        box, distance = room.best(point, extent.width, extent.height)
        by = _PADDING * extent.height
        room.written.append((box[0] - by, box[1] - by, box[2] + by, box[3] + by))
        text.set_position(tuple(to_data.transform(box[:2])))
        text.set_verticalalignment("bottom")
        if distance > _LEADS:
            across, up = zip((label.x, label.y), to_data.transform(_nearest(box, point)), strict=True)
            axes.plot(across, up, color=label.color, linewidth=0.6, zorder=3)


@dataclass
class _Room:
    """The drawn parts of a picture's frame, and the room left for labels, in pixels."""

    inside: Box
    points: Sequence[Point]
    """All points that get a label."""
    drawn: list[Box] = field(default_factory=list)
    """Boxes of the curve and of the dots."""
    written: list[Box] = field(default_factory=list)
    """Boxes of the labels that are placed."""

    def best(self, point: Point, width: float, height: float) -> tuple[Box, float]:
        """The nearest free box, else the one that covers least; and its distance in heights of the label."""
        places = list(_places(point, width, height))
        least = min(places, key=lambda place: self._covers(place[0]) - _common(place[0], self.inside))
        return next((place for place in places if self._is_free(place[0], point, place[1])), least)

    def _covers(self, box: Box) -> float:
        """The area, in pixels, of curve, dots and labels that a label in the box would cover."""
        return sum(_common(box, other) for other in (*self.drawn, *self.written))

    def _is_free(self, box: Box, point: Point, distance: float) -> bool:
        """Whether a label in the box covers nothing and would not be taken for that of another point."""
        left, bottom, right, top = self.inside
        inside = left <= box[0] and bottom <= box[1] and box[2] <= right and box[3] <= top
        if not inside or self._covers(box):
            return False
        if distance > _LEADS:
            lead = [_around(x, y, 1.0) for x, y in _along(point, _nearest(box, point))]
            others = [_around(x, y, _DOT) for x, y in self.points if (x, y) != point]
            return not any(_common(step, other) for step in lead for other in (*self.written, *others))
        own = math.dist(point, _nearest(box, point))
        return all(_NEARER * own < math.dist(other, _nearest(box, other)) for other in self.points if other != point)


def _places(point: Point, width: float, height: float) -> Iterator[tuple[Box, float]]:
    """Boxes to try for a label, the nearest first, with their distances in multiples of its height."""
    for distance in _DISTANCES:
        for degrees in _DIRECTIONS:
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            x = point[0] + across * (distance * height + width / 2)
            y = point[1] + up * (distance * height + height / 2)
            yield (x - width / 2, y - height / 2, x + width / 2, y + height / 2), distance


def _nearest(box: Box, point: Point) -> Point:
    """The point of a box that is nearest to the given point."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _around(x: float, y: float, radius: float) -> Box:
    return (x - radius, y - radius, x + radius, y + radius)


def _along(a: Point, b: Point) -> Iterator[tuple[float, float]]:
    """Points on the line from `a` to `b`, both included, at most 8 pixels apart."""
    steps = max(1, math.ceil(math.dist(a, b) / 8.0))
    for step in range(steps + 1):
        yield a[0] + (b[0] - a[0]) * step / steps, a[1] + (b[1] - a[1]) * step / steps


def _common(a: Box, b: Box) -> float:
    """The area, in pixels, that two boxes have in common."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0

"""Places labels beside the points they name: clear of each other, of the points and of the curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, ...]
Box = tuple[float, float, float, float]
"""Left, bottom, right, top in pixels."""

# Distances from a point at which its label is tried, in multiples of the label's height.
_DISTANCES = (0.9, 1.7, 2.7, 4.0, 5.5, 7.5, 10.0)
# Directions, in degrees, the best first.
_DIRECTIONS = (90, 45, 0, -90, -45, 135, 20, 70, 110, 180, -20, -135, 160, -160)
# From this distance on, in multiples of the height, a line leads from the label to its point.
_LEADS = 1.5
# Half the width of a dot, in pixels.
_DOT = 8.0
# Between labels.
_PADDING = 0.4
# How much nearer, as a factor, a label without a line is to its own point than to any other.
_NEARER = 1.4


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
    """Write each label at the nearest place that is free; where none is, at the one that covers least.

    `line` and `dots` are what must stay visible, in the units of the axes.
    """
    from matplotlib.patheffects import withStroke

    canvas: Any = figure.canvas
    renderer = canvas.get_renderer()
    to_pixels, to_data = axes.transData, axes.transData.inverted()
    points = [tuple(to_pixels.transform((label.x, label.y))) for label in labels]
    frame = axes.get_window_extent(renderer)
    room = Room((frame.x0, frame.y0, frame.x1, frame.y1), points)
    segments = pairwise(tuple(to_pixels.transform(point)) for point in line)
    room.drawn += [_around(x, y, 5.0) for a, b in segments for x, y in _along(a, b)]
    room.drawn += [_around(x, y, _DOT) for x, y in map(to_pixels.transform, dots)]
    for label, point in zip(labels, points, strict=True):
        weight = "bold" if label.bold else "normal"
        text = axes.text(label.x, label.y, label.text, fontsize=font_size, color=label.color, fontweight=weight)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
        extent = text.get_window_extent(renderer)
        box, distance = room.best(point, extent.width, extent.height)
        room.written.append(_padded(box, _PADDING * extent.height))
        x, y = to_data.transform((box[0], box[1]))
        text.set_position((x, y))
        text.set_verticalalignment("bottom")
        if distance > _LEADS:
            across, up = zip((label.x, label.y), to_data.transform(_nearest(box, point)), strict=True)
            axes.plot(across, up, color=label.color, linewidth=0.6, zorder=3)


@dataclass
class Room:
    """Where labels may go, in pixels."""

    inside: Box
    points: Sequence[Point]
    """All that are named."""
    drawn: list[Box] = field(default_factory=list)
    """What is there before any label."""
    written: list[Box] = field(default_factory=list)
    """The labels."""

    def best(self, point: Point, width: float, height: float) -> tuple[Box, float]:
        """The box for a label of that size, and its distance from the point in multiples of its height."""
        places = list(_places(point, width, height))
        least = min(places, key=lambda each: self._covers(each[0]) - _common(each[0], self.inside))
        return next((each for each in places if self._is_free(each[0], point, each[1])), least)

    def _covers(self, box: Box) -> float:
        return sum(_common(box, each) for each in (*self.drawn, *self.written))

    def _is_free(self, box: Box, point: Point, distance: float) -> bool:
        """Nothing is covered, and nobody takes the label for another point's."""
        if not _contains(self.inside, box) or self._covers(box):
            return False
        if distance > _LEADS:
            lead = [_around(x, y, 1.0) for x, y in _along(point, _nearest(box, point))]
            others = [_around(x, y, _DOT) for x, y in self.points if (x, y) != point]
            return not any(_common(step, each) for step in lead for each in (*self.written, *others))
        own = math.dist(point, _nearest(box, point))
        return all(_NEARER * own < math.dist(each, _nearest(box, each)) for each in self.points if each != point)


def _places(point: Point, width: float, height: float) -> Iterator[tuple[Box, float]]:
    """Boxes whose nearest side or corner lies in each direction at each distance."""
    for distance in _DISTANCES:
        for degrees in _DIRECTIONS:
            across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
            x = point[0] + across * (distance * height + width / 2)
            y = point[1] + up * (distance * height + height / 2)
            yield (x - width / 2, y - height / 2, x + width / 2, y + height / 2), distance


def _nearest(box: Box, point: Point) -> Point:
    """The point of a box that is nearest to a point."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _padded(box: Box, by: float) -> Box:
    return box[0] - by, box[1] - by, box[2] + by, box[3] + by


def _around(x: float, y: float, radius: float) -> Box:
    return (x - radius, y - radius, x + radius, y + radius)


def _along(a: Point, b: Point) -> Iterator[tuple[float, float]]:
    """Points between two, a few pixels apart."""
    steps = max(1, math.ceil(math.dist(a, b) / 8.0))
    for step in range(steps + 1):
        yield a[0] + (b[0] - a[0]) * step / steps, a[1] + (b[1] - a[1]) * step / steps


def _common(a: Box, b: Box) -> float:
    """The area, in pixels, of what two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0


def _contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]

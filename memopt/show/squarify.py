"""Squarified treemaps: rectangles of given areas in a box, as near to squares as rows of them allow.

Source: Bruls, Huizing, van Wijk, "Squarified treemaps", 2000.
"""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[float, float, float, float]
"""Left, bottom, width and height."""


def squarify(areas: Sequence[float], box: Box) -> list[Box]:
    """A box for each of the areas, in proportion; the areas are positive, and the largest come first."""
    x, y, width, height = box
    scale = width * height / sum(areas) if areas else 0.0
    placed: list[Box] = []
    start = 0
    while start < len(areas):
        side = min(width, height)
        end = start + 1
        while end < len(areas) and _worst(areas[start : end + 1], side, scale) <= _worst(areas[start:end], side, scale):
            end += 1
        thick = sum(areas[start:end]) * scale / side if side else 0.0
        along = 0.0
        for area in areas[start:end]:
            long = area * scale / thick if thick else 0.0
            placed.append((x, y + along, thick, long) if width >= height else (x + along, y, long, thick))
            along += long
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        start = end
    return placed


def _worst(row: Sequence[float], side: float, scale: float) -> float:
    """The worst ratio of the sides of the rectangles of a row along a side."""
    total = sum(row) * scale
    square = side * side
    return (
        max(square * max(row) * scale / (total * total), total * total / (square * min(row) * scale)) if side else 0.0
    )

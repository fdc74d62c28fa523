"""Pictures of a step: its memory over time, and its bytes by module at the peak, as a squarified treemap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.show.bands import COLOURS, band_of, bands, columns, edges, end_of
from memopt.show.drawing import QUIET, drawn, mark, new_figure, quiet_frame
from memopt.show.step import Step, StepMemory, step_of
from memopt.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 1600
_INK, _LIMIT = "#1b1f24", "#b3421f"
_BUDGET_REACH = 1.7  # the budget is drawn if it is at most this many times the highest peak
_WIDTH, _HEIGHT = 1000.0, 520.0
_HEAD = 17.0
_LETTER = 6.6  # the width of a letter of the labels
_DEPTH = 3
_TIMES = (1.0, "s"), (1e3, "ms"), (1e6, "µs")
"""How many units of the time axis make a second, and their names."""
Box = tuple[float, float, float, float]
"""Left, bottom, width and height."""


def timeline(plan: Plan, path: str | Path | None) -> Figure:
    """The figure of `Plan.plot_timeline`, also written to `path` if that is given."""
    return drawn(lambda: _timeline(plan, step_of(plan)), path)


def treemap(plan: Plan, path: str | Path | None, *, planned: bool) -> Figure:
    """The figure of `Plan.plot_treemap`, also written to `path` if that is given."""
    return drawn(lambda: _treemap(plan, step_of(plan), planned=planned), path)


def _timeline(plan: Plan, step: Step) -> Figure:
    figure, axes = new_figure(9.0, 4.6, left=0.075, right=0.98, bottom=0.22, top=0.87)
    end = end_of(step)
    scale, time_unit = next((one for one in _TIMES if end * one[0] >= 1), _TIMES[-1])
    x = [column / _COLUMNS * end * scale for column in range(_COLUMNS)]
    unit, per_unit = ("GB", GIB) if step.plain.peak_bytes >= GIB else ("MB", 1024**2)
    base = [0.0] * _COLUMNS
    for band, values in bands(step.planned, columns(step.planned, _COLUMNS, end)).items():
        top = [low + value / per_unit for low, value in zip(base, values, strict=True)]
        axes.fill_between(x, base, top, step="post", color=COLOURS[band], linewidth=0, label=band)
        base = top
    moments = zip(x, columns(step.plain, _COLUMNS, end), strict=True)
    points = [(at, step.plain.live_bytes[moment] / per_unit) for at, moment in moments if moment is not None]
    across, up = zip(*points, strict=True)
    axes.plot(across, up, color=_INK, linewidth=1.0, drawstyle="steps-post", label="nothing recomputed")
    highest = max(step.plain.peak_bytes, step.planned.peak_bytes)
    if plan.budget_bytes < _BUDGET_REACH * highest:
        axes.axhline(plan.budget_bytes / per_unit, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label="budget")
        highest = max(highest, plan.budget_bytes)
    axes.set_ylim(0, 1.06 * highest / per_unit)
    axes.set_xlim(0, end * scale)
    _frame(figure, axes, plan, step, unit, time_unit)
    _halves(axes, step.planned, scale)
    return figure


def _halves(axes: Axes, memory: StepMemory, scale: float) -> None:
    """Mark where the backward and the optimizer's step begin, with their names above the frame."""
    begins = edges(memory)
    for name, moment, side in (("backward", memory.boundary, "left"), ("optimizer", len(memory.evaluations), "right")):
        mark(axes, begins[moment] * scale, f" {name} ", side, 8.0, 1.01, linewidth=0.7, linestyle=(0, (1, 2)))


def _title(figure: Figure, plan: Plan, told: str, left: float, right: float) -> None:
    figure.text(left, 0.95, f"{plan.model} on {plan.hardware}", fontsize=12, fontweight="bold")
    figure.text(right, 0.95, told, fontsize=9, color=QUIET, horizontalalignment="right")


def _frame(figure: Figure, axes: Axes, plan: Plan, step: Step, unit: str, time_unit: str) -> None:
    """Draw titles, the labels of the axes and the legend."""
    told = f"peak {size(step.planned.peak_bytes)} within {size(plan.budget_bytes)}"
    _title(figure, plan, f"{told}; {size(step.plain.peak_bytes)} with nothing recomputed", 0.075, 0.98)
    axes.set_xlabel(f"time of the step, {time_unit}", fontsize=9)
    axes.set_ylabel(f"memory, {unit}", fontsize=9)
    quiet_frame(axes, 8.5)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False, handlelength=1.2)


@dataclass
class _Module:
    """A module with its own bytes by band, and the modules in it."""

    path: str = ""
    own: Counter[str] = field(default_factory=Counter)
    parts: dict[str, _Module] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.own.total() + sum(part.nbytes for part in self.parts.values())


def _treemap(plan: Plan, step: Step, *, planned: bool) -> Figure:
    figure, axes = new_figure(9.0, 5.4, left=0.01, right=0.99, bottom=0.1, top=0.9)
    from matplotlib.patches import Patch

    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(_HEIGHT, 0)
    axes.set_axis_off()
    memory = step.planned if planned else step.plain
    root = _tree(step.by_module(memory, memory.peak))
    used: set[str] = set()
    for box, module, band, depth in _boxes(root, (0.0, 0.0, _WIDTH, _HEIGHT), 0):
        _draw(axes, box, module, band, depth)
        used |= {band} - {""}
    which = "as planned" if planned else "with nothing recomputed"
    _title(figure, plan, f"{size(memory.peak_bytes)} at the peak {which}, by module", 0.01, 0.99)
    patches = [Patch(color=colour, label=band) for band, colour in COLOURS.items() if band in used]
    figure.legend(handles=patches, loc="lower center", ncols=6, fontsize=8, frameon=False, handlelength=1.0)
    return figure


def _tree(rows: Mapping[str, Counter[str]]) -> _Module:
    root = _Module()
    for path, held in rows.items():
        module = root
        for part in path.split(".") if path else ():
            module = module.parts.setdefault(part, _Module(f"{module.path}.{part}".lstrip(".")))
        for row, nbytes in held.items():
            module.own[band_of(row)] += nbytes
    return root


def _boxes(module: _Module, box: Box, depth: int) -> Iterator[tuple[Box, _Module, str, int]]:
    """The boxes within `box` of a module's own bytes and of the modules in it: each with the module, its band ("" for a
    module's box) and the depth of nesting. A module comes before what is in it."""
    parts = [(part.nbytes, part, "") for part in map(_through, module.parts.values())]
    parts += [(nbytes, module, band) for band, nbytes in module.own.items()]
    parts = sorted((part for part in parts if part[0] > 0), key=lambda part: -part[0])
    for room, (_, part, band) in zip(squarify([float(part[0]) for part in parts], box), parts, strict=True):
        yield room, part, band, depth
        if not band:
            x, y, width, height = room  # the modules in it lie below its label
            inside = (x + 1.5, y + _HEAD, width - 3, height - _HEAD - 1.5) if _is_named(room, depth) else room
            yield from _boxes(part, inside, depth + 1)


def _through(module: _Module) -> _Module:
    """The module, or the first one below it that has bytes of its own or several submodules."""
    while len(module.parts) == 1 and not module.own:
        (module,) = module.parts.values()
    return module


def _is_named(box: Box, depth: int) -> bool:
    return depth < _DEPTH and box[2] > 50 and box[3] > 30


def _draw(axes: Axes, box: Box, module: _Module, band: str, depth: int) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    if band:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=COLOURS[band], edgecolor="white", linewidth=0.5))
        label = band if not module.path else ""
    elif not _is_named(box, depth):
        return
    else:
        axes.add_patch(Rectangle((x, y), width, height, facecolor="#f1f3f5", edgecolor="white", linewidth=1.0))
        label = ".".join(module.path.split(".")[-2:]) if depth else module.path
    letters = int((width - 8) / _LETTER)
    whole = f"{label} {size(module.nbytes if not band else module.own[band])}"
    text = whole if len(whole) <= letters else label if len(label) <= letters else ""
    if label and text and height > 14:
        axes.text(x + 5, y + 12, text, fontsize=7.5, color=_INK)


def squarify(areas: Sequence[float], box: Box) -> list[Box]:
    """A box within `box` for each of the areas, which are positive, the largest first, in proportion to them."""
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
    """The worst ratio of the sides of the rectangles of these areas, laid in a row along a side of the box."""
    if not side:
        return 0.0
    total, square = sum(row) * scale, side * side
    return max(square * max(row) * scale / (total * total), total * total / (square * min(row) * scale))

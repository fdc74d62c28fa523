"""The picture of a step's bytes by module at its peak, as a treemap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memopt.planning.plan import Plan
from memopt.show.bands import COLOURS, band_of
from memopt.show.drawing import new_figure
from memopt.show.squarify import Box, squarify
from memopt.show.step import Step, StepMemory
from memopt.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 1000.0, 520.0
_HEAD = 17.0
_LETTER = 6.6  # the width of a letter of the labels
_DEPTH = 3


@dataclass
class _Module:
    """A module with its bytes by band, and the modules in it."""

    path: str = ""
    own: Counter[str] = field(default_factory=Counter)
    parts: dict[str, _Module] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.own.total() + sum(part.nbytes for part in self.parts.values())


def treemap_figure(plan: Plan, step: Step, memory: StepMemory) -> Figure:
    """The picture of the peak of one of the step's memories, as a matplotlib figure. Raises `ModuleNotFoundError`."""
    figure = new_figure(9.0, 5.4)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.1, top=0.9)
    axes.set_xlim(0, _WIDTH)
    axes.set_ylim(_HEIGHT, 0)
    axes.set_axis_off()
    root = _tree(step.by_module(memory, memory.peak))
    used: set[str] = set()
    for box, module, band, depth in _boxes(root, (0.0, 0.0, _WIDTH, _HEIGHT), 0):
        _draw(axes, box, module, band, depth)
        used |= {band} - {""}
    which = "as planned" if memory is step.planned else "with nothing recomputed"
    figure.text(0.01, 0.95, f"{plan.model} on {plan.hardware}", fontsize=12, fontweight="bold")
    told = f"{size(memory.peak_bytes)} at the peak {which}, by module"
    figure.text(0.99, 0.95, told, fontsize=9, color="#6b6b6b", horizontalalignment="right")
    _legend(figure, [band for band in COLOURS if band in used])
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
    """The boxes of a module's bands (with the band) and of the modules in it (with ""), the outer ones first."""
    parts = [(part.nbytes, part, "") for part in map(_through, module.parts.values())]
    parts += [(nbytes, module, band) for band, nbytes in module.own.items()]
    parts = sorted((part for part in parts if part[0] > 0), key=lambda part: -part[0])
    for room, (_, part, band) in zip(squarify([float(part[0]) for part in parts], box), parts, strict=True):
        yield room, part, band, depth
        if not band:
            yield from _boxes(part, _inside(room, depth), depth + 1)


def _through(module: _Module) -> _Module:
    """The module, or the first one below it that has more than one thing in it."""
    while len(module.parts) == 1 and not module.own:
        (module,) = module.parts.values()
    return module


def _inside(box: Box, depth: int) -> Box:
    """The room that the label of a module leaves below it; all of it where the module is too small for one."""
    x, y, width, height = box
    return (x + 1.5, y + _HEAD, width - 3, height - _HEAD - 1.5) if _is_named(box, depth) else box


def _is_named(box: Box, depth: int) -> bool:
    return depth < _DEPTH and box[2] > 50 and box[3] > 30


def _draw(axes: Axes, box: Box, module: _Module, band: str, depth: int) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    if band:
        axes.add_patch(Rectangle((x, y), width, height, facecolor=COLOURS[band], edgecolor="white", linewidth=0.5))
        label, room = band if not module.path else "", height
    else:
        if not _is_named(box, depth):
            return
        axes.add_patch(Rectangle((x, y), width, height, facecolor="#f1f3f5", edgecolor="white", linewidth=1.0))
        label, room = (".".join(module.path.split(".")[-2:]) if depth else module.path), height
    letters = int((width - 8) / _LETTER)
    whole = f"{label} {size(module.nbytes if not band else module.own[band])}"
    text = whole if len(whole) <= letters else label if len(label) <= letters else ""
    if label and text and room > 14:
        axes.text(x + 5, y + 12, text, fontsize=7.5, color="#1b1f24")


def _legend(figure: Figure, used: list[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[band], label=band) for band in used]
    figure.legend(handles=patches, loc="lower center", ncols=6, fontsize=8, frameon=False, handlelength=1.0)

"""The picture of a step's memory over its time: as planned in bands, with nothing recomputed as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.errors import GIB
from memopt.planning.plan import Plan
from memopt.show.bands import COLOURS, bands, columns, edges
from memopt.show.drawing import new_figure
from memopt.show.step import Step, StepMemory
from memopt.units import size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 1600
_INK, _QUIET, _LIMIT = "#1b1f24", "#6b6b6b", "#b3421f"
# The budget is drawn if it is at most this many times the highest peak.
_BUDGET_REACH = 1.7


def timeline_figure(plan: Plan, step: Step) -> Figure:
    """The picture as a matplotlib figure. Raises `ModuleNotFoundError`."""
    figure = new_figure(9.0, 4.6)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.075, right=0.98, bottom=0.22, top=0.87)
    end = max(edges(step.planned)[-1], edges(step.plain)[-1])
    x = [column / _COLUMNS * end * _scale(end)[0] for column in range(_COLUMNS)]
    unit, per_unit = ("GB", GIB) if step.plain.peak_bytes >= GIB else ("MB", 1024**2)
    _stack(axes, step.planned, x, end, per_unit)
    _line(axes, step.plain, x, end, per_unit)
    highest = max(step.plain.peak_bytes, step.planned.peak_bytes)
    if plan.budget_bytes < _BUDGET_REACH * highest:
        axes.axhline(plan.budget_bytes / per_unit, color=_LIMIT, linewidth=1.2, linestyle=(0, (5, 3)), label="budget")
        highest = max(highest, plan.budget_bytes)
    axes.set_ylim(0, 1.06 * highest / per_unit)
    axes.set_xlim(0, end * _scale(end)[0])
    _frame(figure, axes, plan, step, unit, _scale(end)[1])
    _halves(axes, step.planned, _scale(end)[0])
    return figure


def _scale(end: float) -> tuple[float, str]:
    """The unit of the time axis, and how many of it make a second."""
    return next(
        ((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if end * scale >= 1), (1e6, "µs")
    )


def _stack(axes: Axes, memory: StepMemory, x: list[float], end: float, per_unit: float) -> None:
    found = bands(memory, columns(memory, _COLUMNS, end))
    base = [0.0] * _COLUMNS
    for band, values in found.items():
        top = [low + value / per_unit for low, value in zip(base, values, strict=True)]
        axes.fill_between(x, base, top, step="post", color=COLOURS[band], linewidth=0, label=band)
        base = top


def _line(axes: Axes, memory: StepMemory, x: list[float], end: float, per_unit: float) -> None:
    moments = columns(memory, _COLUMNS, end)
    pairs = zip(x, moments, strict=True)
    points = [(at, memory.live_bytes[moment] / per_unit) for at, moment in pairs if moment is not None]
    across, up = zip(*points, strict=True)
    axes.plot(across, up, color=_INK, linewidth=1.0, drawstyle="steps-post", label="nothing recomputed")


def _halves(axes: Axes, memory: StepMemory, scale: float) -> None:
    """Name the backward and the optimiser's step above the frame, where they begin."""
    begins = edges(memory)
    for name, moment, align in (("backward", memory.boundary, "left"), ("optimizer", len(memory.evaluations), "right")):
        at = begins[moment] * scale
        axes.axvline(at, color=_QUIET, linewidth=0.7, linestyle=(0, (1, 2)))
        axes.text(
            at, 1.01, f" {name} ", transform=axes.get_xaxis_transform(), fontsize=8.0, color=_QUIET,
            horizontalalignment=align, verticalalignment="bottom",
        )  # fmt: skip


def _frame(figure: Figure, axes: Axes, plan: Plan, step: Step, unit: str, time_unit: str) -> None:
    """Titles, axes and the legend."""
    figure.text(0.075, 0.95, f"{plan.model} on {plan.hardware}", fontsize=12, fontweight="bold")
    told = f"peak {size(step.planned.peak_bytes)} within {size(plan.budget_bytes)}"
    told += f"; {size(step.plain.peak_bytes)} with nothing recomputed"
    figure.text(0.98, 0.95, told, fontsize=9, color=_QUIET, horizontalalignment="right")
    axes.set_xlabel(f"time of the step, {time_unit}", fontsize=9)
    axes.set_ylabel(f"memory, {unit}", fontsize=9)
    axes.tick_params(length=3, color=_QUIET, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_QUIET)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False, handlelength=1.2)

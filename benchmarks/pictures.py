"""The pictures of README and docs: bytes over a step, what each row of the account holds, the frontier, live ranges.

    python -m benchmarks.pictures

GPT-2 of 12 layers, 4 sequences of 512 tokens, AdamW, fp32, planned for a CPU on the meta device; nothing is run.
Writes `docs/pictures/*.svg` and `results/pictures.json`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from transformers import GPT2Config, GPT2LMHeadModel

import memopt
from benchmarks.stamp import stamp, write_result
from examples.models.problems import chain
from memopt.errors import GIB
from memopt.solver import Portfolio, RematProblem, Schedule, simulate

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
RESULT = Path(__file__).parent / "results" / "pictures.json"
CARD, SAMPLES, LENGTH, BUDGET_GB = "cpu", 4, 512, 3
BINS = 400
BEFORE, AFTER, QUIET = "#c4532d", "#1f5fa8", "#6b6b6b"
COLOURS = ("#1f5fa8", "#6ea3d8", "#c4532d", "#e8a87c", "#4a7c59", "#a3c4a8", "#8b6f9c", "#c9c9c9")


def planned() -> memopt.Plan:
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False)).train()
        tokens = torch.zeros(SAMPLES, LENGTH, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens}
    return memopt.plan(model, BUDGET_GB, batch, device=CARD, precision="fp32", allow={"recompute"})


def live_gb(plan: memopt.Plan) -> tuple[Any, Any, Any, Any]:
    """With nothing recomputed, and as planned: seconds at the end of each evaluation, and GB alive during it."""
    joined, schedule = plan.joined, plan.schedule
    assert joined is not None
    assert schedule is not None
    problem, found = joined.problem, []
    for one in (Schedule.save_all(problem), schedule):
        seconds = np.cumsum([problem.ops[op].seconds for op in one.evaluations])
        live = simulate(problem, one).live_bytes + plan.account.resident_bytes
        found += binned(seconds, live / GIB)
    return tuple(found)


def binned(times: Any, values: Any) -> tuple[Any, Any]:
    """The largest value of each of at most `BINS` stretches of time, with the end of the stretch."""
    edges = np.linspace(0, times[-1], BINS + 1)[1:]
    at = np.minimum(np.searchsorted(edges, times), BINS - 1)
    most = [values[at == number].max() for number in np.unique(at)]
    return edges[np.unique(at)], np.array(most)


def timeline(plan: memopt.Plan) -> Figure:
    """GB over the step: with nothing recomputed, as planned, and the budget."""
    times, plain, planned_times, held = live_gb(plan)
    figure, axes = blank(8.0, 3.4)
    for x, y, colour, name in ((times, plain, BEFORE, "nothing recomputed"), (planned_times, held, AFTER, "planned")):
        axes.fill_between(x, y, step="pre", alpha=0.12, color=colour, linewidth=0)
        axes.step(x, y, where="pre", color=colour, linewidth=1.1, label=f"{name}, {x[-1]:.1f} s")
    budget = plan.budget_bytes / GIB
    axes.axhline(budget, color=QUIET, linewidth=0.9, linestyle="--")
    axes.text(times[-1] * 0.005, budget, f"budget {budget:.2f} GB", color=QUIET, fontsize=8, va="bottom")
    axes.set(xlabel="seconds of forward and backward, by the time model", ylabel="GB on the device", ylim=(0, None))
    axes.margins(x=0)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    return figure


def rows(plan: memopt.Plan) -> Figure:
    """The bytes at the peak by row of the account."""
    figure, axes = blank(8.0, 2.1)
    names = list(dict.fromkeys(name for name, nbytes in (*plan.plain.rows, *plan.planned.rows) if nbytes > GIB / 50))
    for height, breakdown in ((1, plan.plain), (0, plan.planned)):
        left, held = 0.0, dict(breakdown.rows)
        for colour, name in zip(COLOURS, names, strict=False):
            width = held.get(name, 0) / GIB
            axes.barh(height, width, left=left, color=colour, height=0.62, label=name if height else None)
            left += width
        axes.text(left, height, f" {breakdown.peak_bytes / GIB:.2f} GB", va="center", fontsize=8)
    axes.set_yticks((1, 0), ("nothing recomputed", "planned"))
    axes.set(xlabel="GB at the peak", xlim=(0, 1.12 * plan.plain_peak_gb))
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return figure


def live_ranges() -> Figure:
    """The live ranges of a forward's values in a small step: all saved, and one recomputed."""
    problem = chain(5)
    saved = Schedule.save_all(problem)
    least = Portfolio(problem).smallest().schedule
    figure = Figure(figsize=(8.0, 2.5), layout="constrained")
    for axes, title, schedule in zip(
        figure.subplots(1, 2), ("everything saved", "recomputed"), (saved, least), strict=True
    ):
        peak = simulate(problem, schedule).peak_bytes // 10
        draw_ranges(axes, problem, schedule)
        axes.set_title(f"{title}: {len(schedule.evaluations)} evaluations, {peak} values at once", fontsize=9)
    return figure


def draw_ranges(axes: Axes, problem: RematProblem, schedule: Schedule) -> None:
    values = len(problem.storages) // 2
    evaluations = schedule.evaluations
    for value in range(values):
        made = [at for at, op in enumerate(evaluations) if value in problem.ops[op].makes]
        for start, end in zip(made, [*made[1:], len(evaluations)], strict=True):
            read = [at for at in range(start, end) if value in problem.ops[evaluations[at]].reads]
            width = max(read, default=start) - start + 1
            axes.barh(value, width, left=start, color=AFTER if start == made[0] else BEFORE, height=0.5)
    axes.set_yticks(range(values), [f"value of f{value}" for value in range(values)], fontsize=8)
    names = [problem.ops[op].name for op in evaluations]
    names = [f"b{name.removesuffix('.grad')}" if name.endswith(".grad") else f"f{name}" for name in names]
    axes.set_xticks([at + 0.5 for at in range(len(evaluations))], [name.replace("bloss", "loss") for name in names])
    axes.tick_params(axis="x", labelsize=6, length=0)
    axes.invert_yaxis()
    tidy(axes)


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(8)
    axes.yaxis.label.set_size(8)
    return figure, axes


def tidy(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    plan = planned()
    frontier = plan.frontier(24)
    FOLDER.mkdir(exist_ok=True)
    # Text as text, and the same names every time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memopt"}):
        for name, figure in (("timeline", timeline(plan)), ("rows", rows(plan)), ("live_ranges", live_ranges())):
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})
        frontier.picture(FOLDER / "frontier.svg")
    figures = {
        "model": f"GPT-2 12L, {SAMPLES}x{LENGTH}, {CARD}",
        "budget_gb": round(plan.budget_bytes / GIB, 3),
        "peak_gb": round(plan.predicted_peak_gb, 3),
        "plain_peak_gb": round(plan.plain_peak_gb, 3),
        "smallest_gb": round(frontier.smallest_gb, 3),
        "added_time": round(plan.added_time, 4),
        "bound": round(plan.bound, 4),
    }
    write_result(RESULT, {**stamp(), "plan": figures})
    print(figures, file=sys.stderr)


if __name__ == "__main__":
    main()

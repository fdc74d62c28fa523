"""The page of a plan: one file of HTML that needs no other, and no network."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from memopt.device.time_model import MEASURED_TIMES
from memopt.errors import GIB
from memopt.planning.cards import OnCard
from memopt.planning.changes import Change
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import PlanDiff
from memopt.show.diff_text import facts_of, fold, label_of, module_of, names_of, title_of
from memopt.show.plan_diffs import Row
from memopt.show.report import AS_CAPTURED
from memopt.show.step import WHY, Step, StepMemory, step_of
from memopt.units import micros

_Texts: TypeAlias = defaultdict[str, int]
"""The number of each text. The page has each text once, and refers to it by its number."""
_SCRIPTS = (
    "text", "state", "data", "moments", "theme", "summary", "axes", "timeline", "tensors", "pointing", "squarify",
    "treemap", "frontier", "cards", "types", "diff", "story", "operators", "search", "start",
)  # fmt: skip
"""The names of the scripts in the order in which they stand in the page. All others are defined before `start` runs."""


def report(plan: Plan, path: str | Path, frontier: Frontier[Any] | None, cards: Sequence[OnCard]) -> None:
    """Write the HTML page that `Plan.report` makes. That of a plan without graphs shows budget and `frontier` only."""
    if plan.source is None:
        write_page(Path(path), page(plan, frontier=frontier))
    else:
        write_page(Path(path), page(plan, step_of(plan), plan.diff(), plan.recipes(), frontier, cards))


def write_page(path: Path, text: str) -> None:
    """Write a page to a file. Raises `ValueError` for a name that is not of an HTML file."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the page is a file named *.html, not {path.name!r}")
    path.write_text(text, encoding="utf-8")


def page(
    plan: Plan,
    step: Step | None = None,
    diff: PlanDiff | None = None,
    recipes: Sequence[Recipe] = (),
    frontier: Frontier[Any] | None = None,
    cards: Sequence[OnCard] = (),
) -> str:
    """The page of a plan as HTML; `step` and `diff` are None for a plan without graphs. The curve of a `frontier` is
    shown with its own recipes."""
    scripts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    texts: _Texts = defaultdict()
    texts.default_factory = texts.__len__
    figures = {
        "plan": _plan(plan),
        "step": step and _step(step, texts),
        "diff": [] if diff is None else _sections(diff, texts),
        "frontier": _frontier(plan, frontier.recipes if frontier else recipes, frontier),
        "cards": [
            [one.name, one.memory_bytes, one.needed_bytes, one.seconds, one.added_time, one.batches] for one in cards
        ],
        "why": WHY,
        "texts": list(texts),
    }
    # Escaped below, because it is put into a `script` element.
    text = json.dumps(figures, ensure_ascii=False, separators=(",", ":"))
    parts = {
        "title": escape(f"{plan.model} on {plan.hardware}: memopt"),
        "style": _asset("page.css"),
        "figures": text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "script": f'"use strict";\n(() => {{\n{scripts}\n}})();',
    }
    before, *marked = _asset("page.html").split("{{")
    filled = (parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in marked))
    return before + "".join(filled)


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "hardware": plan.hardware,
        "method": plan.method,
        "budget": plan.budget_bytes,
        "seconds": plan.step_seconds,
        "added": plan.added_time,
        "bound": plan.bound,
        "own": plan.host_share,
        "measured": list(MEASURED_TIMES),
        "host": plan.host_bytes,
        "moved": plan.moved_bytes,
        "stall": plan.stall_seconds,
        "notes": list(plan.notes),
        "receipt": [[row.lever or AS_CAPTURED, row.peak_bytes, row.seconds] for row in plan.receipt],
        **{
            name: {"peak": peak.peak_bytes, "at": peak.at, "rows": [list(row) for row in peak.rows]}
            for name, peak in (("plain", plan.plain), ("planned", plan.planned))
        },
    }


def _step(step: Step, texts: _Texts) -> dict[str, Any]:
    numbered = ("operator", "half", "module", "fate", "value", "code")
    return {
        "ops": {
            "name": [op.name for op in step.ops],
            **{name: [texts[getattr(op, name)] for op in step.ops] for name in numbered},
            "source": [texts[short_source(op.source)] for op in step.ops],
            "bytes": [op.nbytes for op in step.ops],
            "micros": [micros(op.seconds) for op in step.ops],
            "again": [op.recomputed for op in step.ops],
        },
        "plain": _memory(step.plain, texts),
        "planned": _memory(step.planned, texts),
        "parameters": _rows(step.parameters, texts),
        "types": {
            name: [texts[one[at]] for one in step.types]
            for at, name in enumerate(("name", "operator", "module", "dtype", "reason"))
        },
    }


def _memory(memory: StepMemory, texts: _Texts) -> dict[str, Any]:
    return {
        "resident": _rows(memory.resident, texts),
        "optimizer": _rows(memory.optimizer, texts),
        "boundary": memory.boundary,
        "micros": micros(memory.seconds),
        "op": [one.op for one in memory.evaluations],
        "start": [micros(one.start) for one in memory.evaluations],
        "workspace": [[at, one.workspace_bytes] for at, one in enumerate(memory.evaluations) if one.workspace_bytes],
        "again": [at for at, one in enumerate(memory.evaluations) if one.again],
        "ranges": {
            "op": [kept.op for kept in memory.ranges],
            "bytes": [kept.nbytes for kept in memory.ranges],
            "kind": [texts[kept.kind] for kept in memory.ranges],
            "first": [kept.first for kept in memory.ranges],
            "last": [kept.last for kept in memory.ranges],
        },
    }


def _rows(rows: Mapping[str, int], texts: _Texts) -> list[list[int]]:
    return [[texts[name], nbytes] for name, nbytes in rows.items()]


def _sections(diff: PlanDiff, texts: _Texts) -> list[dict[str, Any]]:
    """The changes as rows of texts, folded as `Plan.diff` prints them, by part of the model."""
    made, found, sections = fold(diff.changes, diff.modules)
    parts = []
    for section, rows in groupby(made, key=lambda row: row.section if "*" in row.section else ""):
        same = [entry for entry in found if entry.place.section == section]
        title = title_of(sections.get(section, [""]), same) if section else ""
        parts.append({"title": title, "rows": [_row(row, sections.get(row.section, [""]), texts) for row in rows]})
    return parts


def _row(row: Row, blocks: Sequence[str], texts: _Texts) -> dict[str, Any]:
    """One row of the diff for the page, with every change that it stands for."""
    first = row.first
    others = len({entry.first.source for entry in row.entries}) - 1
    return {
        "module": module_of(row),
        "kind": first.kind,
        "label": label_of(first),
        "names": names_of(row, blocks),
        "facts": facts_of(row, blocks),
        "code": "" if others else first.code,
        "sign": first.sign,
        "source": short_source(first.source + (f" and {others} more" if others else "")),
        "changes": [_change(change, texts) for entry in row.entries for change in entry.by_block.values()],
    }


def _change(change: Change, texts: _Texts) -> list[Any]:
    op, module, nbytes, time = texts[change.op], texts[change.module], change.nbytes, micros(change.seconds)
    detail, reason, readers = texts[change.detail], texts[change.reason], texts[", ".join(change.readers)]
    return [op, module, nbytes, time, change.times, detail, reason, readers]


def _frontier(plan: Plan, recipes: Sequence[Recipe], curve: Frontier[Any] | None) -> dict[str, Any]:
    """The recipes, and the curve with the plan as one of its points. The plan may add more time than a point at a
    smaller budget, because it was searched for alone; since that point's schedule fits too, it is shown instead."""
    points = [
        (point.budget_gb * GIB, point.peak_gb * GIB, point.added_time, point.bound, point.method)
        for point in (curve.points if curve else ())
    ]
    if curve:
        points.append((plan.budget_bytes, plan.planned.peak_bytes, plan.added_time, plan.bound, plan.method))
    best: list[tuple[float, float, float, float, str]] = []
    for budget, peak, added, bound, method in sorted(points):
        if best and best[-1][2] < added:
            _, peak, added, _, method = best[-1]
        best.append((budget, peak, added, bound, method))
    return {
        "recipes": [[one.name, one.peak_gb * GIB, one.added_time] for one in recipes],
        "points": best,
        "smallest": curve.smallest_gb * GIB if curve else None,
        "floor": curve.floor_gb * GIB if curve else None,
    }


def short_source(source: str) -> str:
    """`source`, a path or "path:line", without the folders above site-packages or the working directory, so that a page
    can be passed on without showing where its author's files are."""
    path = source.rpartition("site-packages/")[2]
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)

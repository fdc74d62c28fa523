"""The figures of a page as JSON: equal texts once, and operators and live ranges as columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.errors import GIB
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.plan import Plan
from memopt.show.diff_sections import DiffRow, DiffSection
from memopt.show.step import WHY, Step, StepMemory, StepOp


@dataclass(frozen=True)
class PageFigures:
    """All that a page shows."""

    plan: Plan
    step: Step | None = None
    """None for a plan without graphs."""
    diff: tuple[DiffSection, ...] = ()
    recipes: Sequence[Recipe] = ()
    """The recipes of checkpointing by hand on the same step."""
    frontier: Frontier[Any] | None = None
    """The whole curve, where it was asked for."""


class Texts:
    """Texts by number; equal ones have the same."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def as_json(figures: PageFigures) -> str:
    """The figures as JSON that may stand within a `script` element."""
    texts = Texts()
    packed = {
        "plan": _plan(figures.plan),
        "step": figures.step and _step(figures.step, texts),
        "diff": [_section(section, texts) for section in figures.diff],
        "frontier": _frontier(figures),
        "why": WHY,
    }
    text = json.dumps({**packed, "texts": list(texts.numbers)}, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.model,
        "hardware": plan.hardware,
        "method": plan.method,
        "budget": plan.budget_bytes,
        "seconds": plan.step_seconds,
        "added": plan.added_time,
        "bound": plan.bound,
        "host": plan.host_bytes,
        "moved": plan.moved_bytes,
        "stall": plan.stall_seconds,
        "notes": list(plan.notes),
        "receipt": [[row.lever, row.peak_bytes, row.seconds] for row in plan.receipt],
        **{
            name: {"peak": peak.peak_bytes, "at": peak.at, "rows": [list(row) for row in peak.rows]}
            for name, peak in (("plain", plan.plain), ("planned", plan.planned))
        },
    }


def _step(step: Step, texts: Texts) -> dict[str, Any]:
    return {
        "ops": _ops(step.ops, texts),
        "plain": _memory(step.plain, texts),
        "planned": _memory(step.planned, texts),
        "parameters": _rows(step.parameters, texts),
        "types": {
            name: [texts(getattr(one, name)) for one in step.types]
            for name in ("name", "operator", "module", "dtype", "reason")
        },
    }


def _ops(ops: Sequence[StepOp], texts: Texts) -> dict[str, list[Any]]:
    return {
        "name": [op.name for op in ops],
        **{
            name: [texts(getattr(op, name)) for op in ops]
            for name in ("operator", "half", "module", "fate", "value", "code")
        },
        "source": [texts(short_source(op.source)) for op in ops],
        "bytes": [op.nbytes for op in ops],
        "micros": [_micros(op.seconds) for op in ops],
        "again": [op.recomputed for op in ops],
    }


def _memory(memory: StepMemory, texts: Texts) -> dict[str, Any]:
    return {
        "resident": _rows(memory.resident, texts),
        "optimizer": _rows(memory.optimizer, texts),
        "boundary": memory.boundary,
        "micros": _micros(memory.seconds),
        "op": [one.op for one in memory.evaluations],
        "start": [_micros(one.start) for one in memory.evaluations],
        "workspace": [[at, one.workspace_bytes] for at, one in enumerate(memory.evaluations) if one.workspace_bytes],
        "again": [at for at, one in enumerate(memory.evaluations) if one.again],
        "ranges": {
            "op": [kept.op for kept in memory.ranges],
            "bytes": [kept.nbytes for kept in memory.ranges],
            "kind": [texts(kept.kind) for kept in memory.ranges],
            "first": [kept.first for kept in memory.ranges],
            "last": [kept.last for kept in memory.ranges],
        },
    }


def _rows(rows: Mapping[str, int], texts: Texts) -> list[list[int]]:
    return [[texts(name), nbytes] for name, nbytes in rows.items()]


def _section(section: DiffSection, texts: Texts) -> dict[str, Any]:
    return {"title": section.title, "rows": [_row(row, texts) for row in section.rows]}


def _row(row: DiffRow, texts: Texts) -> dict[str, Any]:
    changes = [
        [
            texts(change.op),
            texts(change.module),
            change.nbytes,
            _micros(change.seconds),
            change.times,
            texts(change.detail),
            texts(change.reason),
            texts(", ".join(change.readers)),
        ]
        for change in row.changes
    ]
    texts_of_row = {name: getattr(row, name) for name in ("module", "kind", "label", "names", "facts", "code", "sign")}
    return {**texts_of_row, "source": short_source(row.source), "changes": changes}


def _frontier(figures: PageFigures) -> dict[str, Any]:
    curve = figures.frontier
    recipes = curve.recipes if curve else figures.recipes
    return {
        "recipes": [[one.name, one.peak_gb * GIB, one.added_time] for one in recipes],
        "points": [
            [point.budget_gb * GIB, point.peak_gb * GIB, point.added_time, point.bound, point.method]
            for point in (curve.points if curve else ())
        ],
        "smallest": curve.smallest_gb * GIB if curve else None,
        "floor": curve.floor_gb * GIB if curve else None,
    }


def short_source(source: str) -> str:
    """The source line without the folders above site-packages or the working directory, so that a page that is passed
    on does not tell where its author's files are."""
    path = source.rpartition("site-packages/")[2]
    here = f"{Path.cwd()}/"
    return path.removeprefix(here)


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)

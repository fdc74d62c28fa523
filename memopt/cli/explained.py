"""The figures and tables of `memopt explain` for a file: a saved plan, or a snapshot of torch's memory history."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from memopt.cli.failures import UsageError
from memopt.cli.job import Job
from memopt.cli.output import answer, columns, plan_figures
from memopt.planning.plan import Plan
from memopt.show.memory_history import MemoryHistory, read_history
from memopt.show.report import new_table, parts
from memopt.terminal import Column, RenderableType
from memopt.units import size

_LINES = 15


def explain_file(job: Job, op: str | None) -> bool:
    """Explain the file that `job` names in place of a model, if it is a saved plan or a snapshot; returns whether it
    is. `op` is the value of --op, which a file does not allow; None where it is not given.

    Raises `PlanFileError` and `SnapshotError` for a damaged file, and `UsageError` where the file does not exist or
    options are given that apply to models only."""
    path = Path(job.model)
    is_plan = path.suffix == ".json" and _is_plan(path)
    if not is_plan and path.suffix not in (".pickle", ".pkl"):
        return False
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    if op is not None or replace(job, json=False, debug=False) != Job(job.model):
        raise UsageError(f"{path} is shown as it is, not planned again: leave out all options but --json")
    if is_plan:
        plan = Plan.load(path)
        answer(job, plan_figures(plan), *parts(plan, columns()))
    else:
        history = read_history(path)
        figures = {**asdict(history), "rows": history.rows, "advice": history.advice}
        answer(job, figures, *history_parts(history, job.model))
    return True


def _is_plan(path: Path) -> bool:
    """Whether a JSON file is a saved plan, rather than the configuration of a model."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and "format" in values


def history_parts(history: MemoryHistory, path: str) -> list[RenderableType]:
    """A report on what filled the card, as sentences and tables: its bytes by kind of memory, then by function and line
    of code; and what memopt would do about each kind. `path` is the file's, for the text."""
    end = f"{size(history.allocated_bytes)} allocated of the {size(history.reserved_bytes)} that torch had reserved"
    if history.missing_bytes is not None:
        end = f"an allocation of {size(history.missing_bytes)} failed, with {size(history.free_bytes)} free and {end}"
    whole = sum(history.rows.values()) or 1
    rows = new_table("What filled the card", "row", right=("bytes", "share"))
    for row, nbytes in history.rows.items():
        rows.add_row(row, size(nbytes), f"{nbytes / whole:.0%}")
    shown = history.held[:_LINES]
    headers = Column("function and line", overflow="fold", min_width=20), Column("row", overflow="fold")
    title = f"The lines of code that allocated most of these bytes ({len(shown)} of {len(history.held)})"
    lines = new_table(title, *headers, right=("blocks", "bytes"))
    for one in shown:
        lines.add_row(one.place or "(no line outside of torch)", one.row, str(one.blocks), size(one.nbytes))
    advice = [f"{row}: {text}" for row, text in history.advice.items()]
    plan = f"what that saves and costs: memopt plan MODEL --budget-gb GB, where MODEL is the model that {path} is of"
    return [
        f"GPU {history.device}: at most {size(history.peak_bytes)} allocated at once; at the end {end}",
        rows,
        lines,
        "What memopt would do about each row",
        *advice,
        plan,
    ]

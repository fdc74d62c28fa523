"""What commands print: text and tables in the width of the terminal, or JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from memopt.cli.early import UsageError
from memopt.terminal import Console, RenderableType

if TYPE_CHECKING:
    from memopt.cli.job import Job
    from memopt.planning.plan import Plan

_WIDTH_OF_FILES = 110


def columns(file: TextIO | None = None) -> int:
    """The width, in columns, of the text that `show` prints, or that `file` takes if one is given."""
    console = Console(file=file)
    if console.is_terminal:
        return console.width
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) else _WIDTH_OF_FILES


def show(*parts: RenderableType) -> None:
    """Print sentences and tables: coloured and in its width on a terminal, elsewhere plain and `columns` wide."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    from memopt.show.report import as_text  # loads torch, which help texts do without

    print(as_text(*parts, width=columns()))


def in_columns(text: str, file: TextIO) -> str:
    """The text wrapped between words to the columns of `file`; indented lines, as of tables, stay as they are."""
    width = columns(file)
    lines = (
        [line] if line.startswith(" ") else textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join(line for broken in lines for line in broken)


def show_json(figures: Any) -> None:
    """Print a value, such as a dict of numbers, as JSON."""
    print(json.dumps(figures, indent=2, ensure_ascii=False))


def answer(job: Job, figures: Any, *parts: RenderableType) -> None:
    """Print the answer to a command: `figures` as JSON if the job has --json, else the sentences and tables `parts`."""
    if job.json:
        show_json(figures)
    else:
        show(*parts)


def check_file(option: str, file: str | None) -> None:
    """Raise `UsageError` where the file given for an option cannot be written, before time is spent on planning."""
    if file is None:
        return
    folder = Path(file).parent
    if not folder.is_dir():
        raise UsageError(f"{option}: there is no folder {folder}")
    if Path(file).is_dir():
        raise UsageError(f"{option}: {file} is a folder; name a file")
    if Path(file).exists():  # it may be a device or a pipe in a folder in which no file can be made
        return
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{option}: nothing can be written in {folder} ({error.strerror}); name another folder"
        ) from error


def failure_figures(error: Exception, exit_code: int, sentence: str) -> dict[str, Any]:
    """A failure for JSON: of a `BudgetError` all figures; of any other error, its sentence and the exit code."""
    from memopt.errors import GIB, BudgetError

    if not isinstance(error, BudgetError):
        return {"error": sentence, "exit_code": exit_code}
    return {
        "fits": False,
        "budget_gb": error.budget_gb,
        "smallest_gb": error.smallest_gb,
        "dominated_by": error.dominated_by,
        "missing_gb": error.smallest_gb - error.budget_gb,
        "further": list(error.further),
        "ways": [{**dataclasses.asdict(way), "peak_gb": way.peak_bytes / GIB} for way in error.ways],
        "allow_also": [list(names) for names in error.proposals],
        "untried": list(error.untried),
    }


def plan_figures(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan for JSON: bytes, seconds, GB of 1024³ bytes, and shares as fractions, by name."""
    from memopt.device.time_model import measured_seconds
    from memopt.show.report import AS_CAPTURED, before_all

    return {
        "fits": True,
        "model": plan.model,
        "device": plan.hardware,
        "budget_gb": plan.budget_bytes / 1024**3,
        "peak_gb": plan.predicted_peak_gb,
        "plain_peak_gb": before_all(plan)[1] / 1024**3,
        "nothing_recomputed_peak_gb": plan.plain_peak_gb,
        "step_seconds": plan.step_seconds,
        "added_time": plan.added_time,
        "added_time_at_least": plan.bound,
        "own_work": plan.host_share,
        "step_seconds_measured": measured_seconds(plan.step_seconds + plan.added_seconds),
        "method": plan.method,
        "levers": [*plan.levers, *["recompute"] * any(row.recomputed_ops for row in plan.modules)],
        "optimizer_levers": list(plan.proposals),
        "host_bytes": plan.host_bytes,
        "bytes_at_the_peak": {"nothing_recomputed": dict(plan.plain.rows), "planned": dict(plan.planned.rows)},
        "receipt": [{**dataclasses.asdict(row), "lever": row.lever or AS_CAPTURED} for row in plan.receipt],
        "modules": [dataclasses.asdict(row) for row in plan.modules],
        "notes": list(plan.notes),
    }

"""The tables of a plan, as plain text."""

from __future__ import annotations

import io
import math
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from memopt.device.time_model import measured_seconds
from memopt.errors import GIB
from memopt.planning.cluster_step import ClusterStep
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.schedule_parts import ModuleRow
from memopt.terminal import Column, Console, RenderableType, Table
from memopt.units import duration, size

_MODULE_ROWS = 60
AS_CAPTURED = "as captured"
BRIEF_LINES = 40
"""The most lines that `print(plan)` takes."""
# The most rows of bytes and of modules that `brief` shows, tried in this order until `BRIEF_LINES` lines suffice.
_BRIEF = ((99, 16), (99, 10), (99, 6), (8, 8), (8, 5), (6, 4), (4, 2))
_BRIEF_NOTES = 3
_WIDE = 100  # tables of modules that are narrower have no columns for the numbers of operators
_NOTABLE = 0.0005
"""The least share of a step that guards and memopt's Python code must take to be mentioned: half of the last digit of
the added time."""
_MODULE_WIDTH = 16  # names of modules are not folded to fewer columns, however narrow the terminal is


def render(plan: Plan, width: int = 110) -> str:
    """A headline, the bytes at the peak, the levers, and a row per module, as text of `width` columns."""
    return as_text(*parts(plan, width), width=width)


def brief(plan: Plan, width: int = 110) -> str:
    """The text of `render`, shortened to at most `BRIEF_LINES` lines: small rows of bytes, and modules, are summed;
    only the first notes are shown, on one line each; and the last line says how to print the rest."""
    whole = render(plan, width)
    if whole.count("\n") < BRIEF_LINES:
        return whole
    left = f", {len(plan.notes) - _BRIEF_NOTES} more notes" if len(plan.notes) > _BRIEF_NOTES else ""
    notes = [textwrap.shorten(f"note: {note}", width, placeholder=" …") for note in plan.notes[:_BRIEF_NOTES]]
    for byte_rows, module_rows in _BRIEF:
        tables = _tables(plan, width, byte_rows, module_rows)
        text = as_text(*tables, *notes, f"all rows and modules{left}: print(plan.table())", width=width)
        if text.count("\n") < BRIEF_LINES:
            break
    return text


def parts(plan: Plan, width: int = 110) -> list[RenderableType]:
    """The sentences and rich tables that `render` shows in `width` columns."""
    return [*_tables(plan, width), *(f"note: {note}" for note in plan.notes)]


def _tables(
    plan: Plan, width: int, byte_rows: int | None = None, module_rows: int | None = None
) -> list[RenderableType]:
    """The headline and the tables, with at most so many rows of bytes and of modules (None: all, `_MODULE_ROWS`)."""
    shown: list[RenderableType | None] = [
        headline(plan),
        _offload_line(plan) if plan.moved_bytes else None,
        _hosted_line(plan) if plan.hosted_bytes else None,
        _kept_line(plan) if plan.kept else None,
        _decisions_line(plan) if plan.decisions else None,
        _cluster_table(plan.cluster) if plan.cluster else None,
        bytes_table(plan, byte_rows),
        receipt_table(plan) if len(plan.receipt) > 1 else None,
        _module_table(plan, width, module_rows),
    ]
    return [part for part in shown if part is not None]


def as_text(*parts: RenderableType, width: int = 110) -> str:
    """Text and rich tables as plain text of `width` columns, without colours."""
    page = io.StringIO()
    console = Console(file=page, width=width, color_system=None, highlight=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines())


def new_table(title: str, *headers: str | Column, right: Iterable[str] = ()) -> Table:
    """A table without rows: columns with these `headers`, then columns `right`, which are aligned to the right."""
    numbers = (Column(header, justify="right") for header in right)
    return Table(*headers, *numbers, title=title, title_justify="left")


def headline(plan: Plan) -> str:
    """The plan in one sentence: its peak and the budget, the peaks of the plain step and with nothing recomputed, and
    its added time."""
    name, before = before_all(plan)
    between = f", nothing recomputed {size(plan.plain.peak_bytes)}" * (before != plan.plain.peak_bytes)
    return (
        f"{plan.model}, planned for {plan.hardware} with {plan.method}: "
        f"peak {size(plan.planned.peak_bytes)}, {plan.planned.peak_bytes / plan.budget_bytes:.1%} of the budget of "
        f"{plan.budget_bytes / GIB:.6g} GB ({name} {size(before)}{between}), "
        f"added time {_added(plan)}"
    )


def _added(plan: Plan) -> str:
    """The added time in words, with the part of memopt's own code, the lower bound, and the time to expect."""
    fastest, slowest = map(duration, measured_seconds(plan.step_seconds + plan.added_seconds))
    own = f"{plan.host_share:.1%} for Dynamo's guards and memopt's Python code"
    own = f"including {own}, " if plan.host_share >= _NOTABLE else ""
    return (
        f"{plan.added_time + plan.host_share:.1%} of {duration(plan.step_seconds)} ({own}no plan adds less than "
        f"{plan.bound + plan.host_share:.1%}; expect a step of {fastest} to {slowest})"
    )


def before_all(plan: Plan) -> tuple[str, int]:
    """The step that a plan is compared with, as a phrase, and its peak: the plain step, or else the captured one."""
    first = plan.receipt[0] if plan.receipt else ReceiptRow("", plan.plain.peak_bytes, plan.step_seconds)
    return first.lever or AS_CAPTURED, first.peak_bytes


def _offload_line(plan: Plan) -> str:
    return (
        f"offloaded: {size(plan.moved_bytes)} per step are copied to the host and back, at most "
        f"{size(plan.host_bytes)} at a time; {_bound(plan)}"
    )


def _hosted_line(plan: Plan) -> str:
    return (
        f"on the host: {size(plan.hosted_bytes)} of frozen parameters, of which a step copies "
        f"{size(plan.brought_bytes)} to the device{'' if plan.moved_bytes else f'; {_bound(plan)}'}"
    )


def _bound(plan: Plan) -> str:
    """Whether compute or the link to the host bounds the time of a step, in words."""
    if plan.stall_seconds <= NEGLIGIBLE * plan.step_seconds:
        return "compute hides the copies and bounds the step"
    return f"compute waits {duration(plan.stall_seconds)} for the copies: the link to the host bounds the step"


def _kept_line(plan: Plan) -> str:
    paths = [path for path, _ in plan.kept]
    named = paths[0] if len(paths) == 1 else f"{paths[0]} to {paths[-1]}"
    held = size(sum(nbytes for _, nbytes in plan.kept))
    return (
        f"kept gathered: {held} of parameters of {named} stay gathered from forward to backward, which does not gather "
        "them again"
    )


def _decisions_line(plan: Plan) -> str:
    calls: Counter[str] = Counter()
    for row in plan.decisions:
        calls[row.operator] += row.calls
    named = ", ".join(f"{count} {operator}" for operator, count in calls.most_common())
    paths = [path or "(model)" for path in dict.fromkeys(row.path for row in plan.decisions)]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    saved = size(sum(row.saved_bytes for row in plan.decisions))
    return (
        f"never recomputed, since they make discrete choices that rounding could change: {named} in {paths[0]}{more}; "
        f"{saved} of their results are saved"
    )


def bytes_table(plan: Plan, most: int | None = None) -> Table:
    """The bytes of each row of the account at the peak. Of more than `most` rows, the smallest are summed in one."""
    table = new_table("Where every byte goes at the peak", "row", right=("nothing recomputed", "planned"))
    plain, planned = dict(plan.plain.rows), dict(plan.planned.rows)
    names = list(dict.fromkeys([*plain, *planned]))
    by_size = sorted(names, key=lambda name: -max(plain.get(name, 0), planned.get(name, 0)))
    others = set(by_size[most - 1 :] if most is not None and len(names) > most else ())
    for name in names:
        if name not in others:
            table.add_row(name, size(plain.get(name, 0)), size(planned.get(name, 0)))
    if others:
        sums = (size(sum(rows.get(name, 0) for name in others)) for rows in (plain, planned))
        table.add_row(f"{len(others)} smaller rows", *sums)
    table.add_section()
    table.add_row("peak", size(plan.plain.peak_bytes), size(plan.planned.peak_bytes))
    table.add_row("at", plan.plain.at, plan.planned.at)
    if plan.moved_bytes or plan.hosted_bytes:
        table.add_section()
        room = f" of {size(plan.host_room_bytes)}" if plan.hosted_bytes and plan.host_room_bytes else ""
        table.add_row("host memory for offloads", size(0), f"{size(plan.host_bytes)}{room}")
    return table


def _module_table(plan: Plan, width: int, most: int | None = None) -> Table:
    """A row for each module or run of equal blocks, summed over submodules down to at most `most` rows."""
    rows = alike(folded(plan.modules)) if most is None else alike(folded(plan.modules, most, runs=True))
    wide, offloads = width >= _WIDE, bool(plan.moved_bytes)
    longest = max((len(row.path) for row, *_ in rows), default=0)
    module = Column("module", overflow="fold", min_width=min(longest, _MODULE_WIDTH))
    right = [*["ops"] * wide, "saved", *["offloaded"] * offloads, *["ops recomputed"] * wide]
    right += ["recomputed", "time", "added"]
    table = new_table("What each module saves for the backward, and recomputes", module, right=right)
    for row, last, times in rows:
        others = f" … {last.path.rpartition('.')[2]}, each of {times}" if times > 1 else ""
        table.add_row(
            (row.path or "(model)") + others,
            *[str(row.ops)] * wide,
            size(row.saved_bytes),
            *[size(row.offloaded_bytes)] * offloads,
            *[str(row.recomputed_ops or "–")] * wide,
            size(row.recomputed_bytes),
            duration(row.seconds),
            duration(row.added_seconds),
        )
    return table


def receipt_table(plan: Plan) -> Table:
    """A table with the plain step, then a row for each lever: the step's peak and time with it and all levers before
    it, and what it changed in both. Added times are fractions of `Plan.step_seconds`."""
    table = new_table("Levers in use", "lever", right=("peak", "less", "time", "added"))
    before = plan.receipt[0]
    for row in plan.receipt:
        less = before.peak_bytes - row.peak_bytes
        added = (row.seconds - before.seconds) / (plan.step_seconds or 1.0)
        cells = ("", "") if row is before else (size(less), f"{added:+.1%}")
        table.add_row(row.lever or AS_CAPTURED, size(row.peak_bytes), cells[0], duration(row.seconds), cells[1])
        before = row
    return table


def folded(rows: Iterable[ModuleRow], most: int = _MODULE_ROWS, *, runs: bool = False) -> list[ModuleRow]:
    """The rows of modules, cut at the deepest level of the module tree with at most `most` rows, or else the top one:
    rows below it are added up. With `runs`, equal rows in a sequence count as one (see `alike`)."""
    rows = list(rows)
    deepest = max((row.path.count(".") for row in rows), default=0)
    for depth in range(deepest, -1, -1):
        merged: dict[str, ModuleRow] = {}
        for row in rows:
            path = ".".join(row.path.split(".")[: depth + 1])
            known = vars(merged[path]) if path in merged else {}
            sums = {name: value + getattr(row, name) for name, value in known.items() if name != "path"}
            merged[path] = replace(row, path=path, **sums)
        found = list(merged.values())
        if len(alike(found) if runs else found) <= most:
            break
    return found


def alike(rows: Iterable[ModuleRow]) -> list[tuple[ModuleRow, ModuleRow, int]]:
    """The first row, the last row and the length of each run of equal neighbours in a list of modules ("layers.0",
    "layers.1", …); a row by itself is a run of 1."""
    runs: list[tuple[ModuleRow, ModuleRow, int]] = []
    for row in rows:
        if runs and row.path[-1:].isdigit() and _siblings(runs[-1][1], row):
            first, _, times = runs[-1]
            runs[-1] = (first, row, times + 1)
        else:
            runs.append((row, row, 1))
    return runs


def _siblings(a: ModuleRow, b: ModuleRow) -> bool:
    """Whether two rows are numbered elements of one list of modules with equal figures, but for rounding of times."""
    if a.path.rpartition(".")[0] != b.path.rpartition(".")[0] or not a.path[-1:].isdigit():
        return False
    times = ((a.seconds, b.seconds), (a.added_seconds, b.added_seconds))
    close = all(math.isclose(mine, theirs, rel_tol=1e-6) for mine, theirs in times)
    return close and a == replace(b, path=a.path, seconds=a.seconds, added_seconds=a.added_seconds)


def _cluster_table(step: ClusterStep) -> Table:
    """The seconds of one card's step by what bounds them, and the exchanges of its groups of parameters."""
    title = (
        f"On {step.cards:,} cards ({step.mesh}) over {step.interconnect}: a step takes {duration(step.seconds)}, most "
        f"of it bounded by {step.bound}"
    )
    table = new_table(title, "bounded by", right=("time", "of the step"))
    for name, seconds in step.bounds:
        table.add_row(name, duration(seconds), f"{seconds / step.seconds:.1%}")
    table.add_section()
    table.add_row("all gathers", duration(step.gathers_seconds), "")
    table.add_row("all reductions", duration(step.reductions_seconds), "")
    largest = max(step.blocks, key=lambda block: block[1])
    table.add_row(f"largest group ({largest[0] or 'root'})", size(largest[1]), "")
    return table

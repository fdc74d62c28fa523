"""Memory locks: the figures of a training step and their rows, in a file, compared with later versions of the step."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from memopt.checks.locked_rows import FIGURES, LockedRow, locked_rows
from memopt.compat.check import check as check_torch
from memopt.errors import BudgetError
from memopt.planning.options import Options
from memopt.run.session import Session
from memopt.show.page import short_source
from memopt.show.report import as_text, new_table
from memopt.units import duration, size

_TOLERANCE = 0.01
"""The share of its locked value by which a figure may grow; the added time may grow by this share of the step's
time."""
_NAMES = {
    "plain": "peak of the plain step",
    "planned": "peak of the planned step",
    "smallest": "smallest budget",
    "added": "added time",
}
_PACKAGES = ("memopt", "torch")
_ROOM = 1.02
_SHOWN = 6
_NOTABLE = 0.1
"""A line is reported if it grew by at least this share of what the line that grew most grew by."""


@dataclass(frozen=True)
class MemoryLock:
    """The figures of a training step (peaks and smallest budget in bytes, added time in seconds), and the rows that
    they are made of, to be compared with later versions of the step."""

    model: str
    device: str
    plain: int
    """Peak in bytes of the step as the plain model runs it; where that cannot be counted, of the captured step."""
    planned: int
    smallest: int
    added: float
    seconds: float
    """Seconds of the step with nothing recomputed."""
    versions: Mapping[str, str]
    """The versions of torch, memopt, and the packages that have lines in `rows`."""
    files: Mapping[str, str]
    """Digests of the user's own files that have lines in `rows`."""
    rows: tuple[LockedRow, ...]


def lock_step(model: nn.Module, example_inputs: Any, options: Options, *, enlarged: bool = False) -> MemoryLock:
    """The memory lock of a training step as `memopt.plan` plans it. Raises `BudgetError` where the step does not fit;
    with `enlarged`, it is then planned for 1.02 times the smallest budget that works."""
    check_torch()
    session = Session(model, options)
    try:
        plan = session.plan(example_inputs, advise=not enlarged)
    except BudgetError as refused:
        if not enlarged:
            raise
        plan = Session(model, replace(options, budget_bytes=round(_ROOM * refused.smallest_bytes))).plan(example_inputs)
    counted = session.plain_bytes(example_inputs)
    captured = plan.receipt[0].peak_bytes if plan.receipt else plan.plain.peak_bytes
    rows = locked_rows(plan)
    files = {row.source.rpartition(":")[0] for row in rows if row.source}
    return MemoryLock(
        plan.model,
        plan.hardware,
        captured if counted is None else counted,
        plan.predicted_peak_bytes,
        plan.smallest_bytes(),
        plan.added_seconds,
        plan.step_seconds,
        {name: _version(name) for name in sorted({*_PACKAGES, *filter(None, map(_package, files))})},
        {short_source(name): _digest(name) for name in sorted(files) if not _package(name)},
        tuple(replace(row, source=short_source(row.source)) for row in rows),
    )


@dataclass(frozen=True)
class _Culprit:
    """A line of code that made a step grow, and the modules in which it runs; their paths differ in numbers only."""

    modules: tuple[str, ...]
    operators: tuple[str, ...]
    source: str
    code: str
    grown: str
    """The line's growth since the lock, in words."""

    def __str__(self) -> str:
        where = self.modules[0] or "(model)"
        if len(self.modules) > 1:
            where += f" … {self.modules[-1]} ({len(self.modules)} modules)"
        line = f", {self.source}" if self.source else ""
        code = f"\n    {self.code}" if self.code else ""
        return f"{where}{line}: {', '.join(self.operators)}: {self.grown}{code}"


def _differing(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """The keys whose values differ between two mappings, or that only one of them has."""
    return [name for name in {**new, **old} if old.get(name) != new.get(name)]


@dataclass(frozen=True)
class LockCheck:
    """A memory lock compared with what the same step holds now. `str` gives a table of the figures, and below it the
    lines that made them grow."""

    locked: MemoryLock
    now: MemoryLock

    @property
    def grown(self) -> tuple[str, ...]:
        """The figures among "plain", "planned", "smallest" and "added" that grew by more than 1% (`_TOLERANCE`),
        "added" by more than that of the locked step's time."""
        return tuple(figure for figure in _NAMES if self._growth(figure) > _TOLERANCE * self._whole(figure))

    def _growth(self, figure: str) -> float:
        return getattr(self.now, figure) - getattr(self.locked, figure)

    def _whole(self, figure: str) -> float:
        """The reference value for the growth of a figure."""
        return self.locked.seconds if figure == "added" else getattr(self.locked, figure)

    @property
    def changed(self) -> tuple[str, ...]:
        """Versions of packages, and the user's own files in the step, that are others than in the lock."""
        old, new = self.locked, self.now
        found = []
        for name in _differing(old.versions, new.versions):
            found.append(f"{name} {old.versions.get(name, 'none')} → {new.versions.get(name, 'none')}")
        for name in _differing(old.files, new.files):
            found.append(f"{name} (your code{'' if name in new.files else ', no longer in the step'})")
        return tuple(found)

    @property
    def culprits(self) -> tuple[_Culprit, ...]:
        """The lines of code because of which the first figure in `grown` grew, in the order of the step; empty if no
        figure grew. They are the lines that allocate more bytes than before or are no longer under activation
        checkpoints. Where no line does, they are those with more bytes alive at the figure's peak (for "added": with a
        longer recomputation); where there is none either, those that compute more bytes within kernels."""
        return tuple(_culprits(self.locked.rows, self.now.rows, self.grown[0])) if self.grown else ()

    def __str__(self) -> str:
        table = new_table(f"{self.now.model} on {self.now.device}", "", right=("locked", "now", "growth"))
        for figure, name in _NAMES.items():
            before, growth = getattr(self.locked, figure), self._growth(figure)
            text = duration if figure == "added" else size
            share = f"{growth / self._whole(figure):+.1%}" if self._whole(figure) else "–"
            table.add_row(name, text(before), text(getattr(self.now, figure)), share)
        lines = [as_text(table)]
        if self.grown:
            named = self.culprits
            lines += ["lines of code that hold more or recompute longer than in the lock, in the order of the step:"]
            lines += map(str, named[:_SHOWN])
            lines += [f"and {len(named) - _SHOWN} more lines"] * (len(named) > _SHOWN)
            lines += ["changed since: " + (", ".join(self.changed) or "no file and no package version in the lock")]
        return "\n".join(lines)


def _culprits(old: Iterable[LockedRow], new: tuple[LockedRow, ...], grown: str) -> Iterator[_Culprit]:
    """The lines of `LockCheck.culprits`, from the rows before (`old`) and now (`new`)."""
    before, after = _sums(old), _sums(new)
    more = {key: {name: figures[name] - before[key][name] for name in FIGURES} for key, figures in after.items()}
    dropped = [key for key, change in more.items() if change["checkpointed"] < min(0, change["calls"])]
    free = {key: after[key]["made"] for key in dropped if more[key]["made"] >= 0}
    made, fused = (
        {key: change[name] for key, change in more.items() if change[name] > 0} for name in ("made", "fused")
    )
    lines_at_peak = any(more[module, row.operator][grown] > 0 for row in new if row.source for module in row.modules)
    within = not (grown == "plain" or made or free or lines_at_peak)  # gaps between blocks grew, and no line's memory
    if within or (grown == "plain" and sum(made.values()) < _TOLERANCE * sum(fused.values())):
        made = fused
    causes = {**made, **free}
    weights = dict(causes) or {key: change[grown] for key, change in more.items() if change[grown] > 0}
    known = {(module, *_line(row)) for row in old for module in row.modules}
    lines: dict[tuple[str, str], list[tuple[str, LockedRow, float]]] = defaultdict(list)
    for row in new:
        for module in row.modules:
            key = module, row.operator
            if key in weights and not (causes and (module, *_line(row)) in known):
                lines[row.pattern, row.source].append((module, row, weights.pop(key)))
    largest = max((sum(weight for *_, weight in found) for found in lines.values()), default=0)
    for found in lines.values():
        total = sum(weight for *_, weight in found)
        module, row, _ = found[0]
        if total >= _NOTABLE * largest or row.operator == "inputs":  # larger inputs are the cause, however small
            how = ("more within kernels" if within else "more") if causes else "more at the peak"
            how = "no longer checkpointed" if (module, row.operator) in free else how
            text = duration(total) if grown == "added" and not causes else size(round(total))
            modules, operators = ({one[0]: None for one in found}, {one[1].operator: None for one in found})
            yield _Culprit(tuple(modules), tuple(operators), row.source, row.code, f"{text} {how}")


def _line(row: LockedRow) -> tuple[object, ...]:
    """A key by which a line of code is recognised when it has moved in its file."""
    return row.operator, row.code, row.made, row.fused, row.checkpointed


def _sums(rows: Iterable[LockedRow]) -> defaultdict[tuple[str, str], Counter[str]]:
    """The figures summed by module and operator. Lines are no part of the key, since users edit them."""
    found: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        for module in row.modules:
            found[module, row.operator].update({name: getattr(row, name) for name in FIGURES})
    return found


def _package(file: str) -> str:
    """The installed package that a file belongs to; "" for the user's own."""
    return file.rpartition("site-packages/")[2].partition("/")[0] if "site-packages/" in file else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _digest(file: str) -> str:
    path = Path(file)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""

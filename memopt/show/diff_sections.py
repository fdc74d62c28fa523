"""The changes of a plan as rows of plain texts, for pages: folded as in the text, with every change below its row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from memopt.planning.changes import Change
from memopt.show.diff_rows import Row
from memopt.show.diff_text import facts_of, fold, label_of, module_of, names_of, title_of


@dataclass(frozen=True)
class DiffRow:
    """One line of the diff, and the changes that it stands for."""

    module: str
    kind: str
    label: str
    """What is written for the kind: the dtypes, or the kind itself."""
    names: str
    facts: str
    source: str
    code: str
    sign: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class DiffSection:
    """The rows of one part of the model; `title` names its blocks, and is "" outside of blocks."""

    title: str
    rows: tuple[DiffRow, ...]


def diff_sections(changes: Sequence[Change], modules: Sequence[str]) -> tuple[DiffSection, ...]:
    """The sections of the changes, in the order of `modules`."""
    made, found, sections = fold(changes, modules)

    def parts() -> Iterator[DiffSection]:
        for section, rows in groupby(made, key=lambda row: row.section if "*" in row.section else ""):
            blocks = sections.get(section, [""])
            same = [entry for entry in found if entry.place.section == section]
            yield DiffSection(title_of(blocks, same) if section else "", tuple(_row(row, sections) for row in rows))

    return tuple(parts())


def _row(row: Row, sections: dict[str, list[str]]) -> DiffRow:
    blocks = sections.get(row.section, [""])
    first = row.first
    others = len({entry.first.source for entry in row.entries}) - 1
    return DiffRow(
        module_of(row),
        first.kind,
        label_of(first),
        names_of(row, blocks),
        facts_of(row, blocks),
        first.source + (f" and {others} more" if others else ""),
        "" if others else first.code,
        first.sign,
        tuple(change for entry in row.entries for change in entry.by_block.values()),
    )

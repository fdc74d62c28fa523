"""The changes that a plan makes to the captured step, as text: by module, with similar changes on one line."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from memopt.planning.changes import CAST, DTYPE, IN_PLACE, KEPT, KINDS, MOVED, OFFLOADED, RECOMPUTED, SAVED, Change
from memopt.show.plan_diffs import LEVELS, DiffEntry, Row, blocks_of, entries, places, rows
from memopt.terminal import Console, Text
from memopt.units import duration, size

WIDTH = 120
_MOST_LINES, _MOST_LINES_OF_MANY, _MANY = 57, 76, 12
"""The numbers of lines to which a diff is folded where that is possible: the first for models of up to `_MANY` blocks,
the second for models of more."""
_HEADING = 2
"""The lines of a heading that these numbers leave room for; each further line of a heading is taken off them."""
_COLOURS = {RECOMPUTED: "yellow", OFFLOADED: "magenta", SAVED: "blue", DTYPE: "cyan", CAST: "cyan", MOVED: "dim"}
_NAMES = 4
_LABELS = {DTYPE: "in another dtype", CAST: "with operands cast only", SAVED: "saved in fewer bits"}
_CONSOLE = Console(width=WIDTH, color_system=None)


def render(heading: str, changes: Sequence[Change], modules: Sequence[str], width: int = WIDTH) -> Text:
    """The heading, and the changes by module in the order of `modules`, as coloured text of `width` columns."""
    head = _wrapped(Text(heading, style="bold"), 2, width)
    made, found, sections = fold(changes, modules, width, len(head))
    page = Text("\n").join([*head, *_lines(made, found, sections, width)])
    page.rstrip()
    return page


def fold(
    changes: Sequence[Change], modules: Sequence[str], width: int = WIDTH, taken: int = _HEADING
) -> tuple[list[Row], list[DiffEntry], dict[str, list[str]]]:
    """The changes as rows for lines of `width` columns, in the order of `modules`, the entries that these are made of,
    and the blocks of each section. `taken` is the number of lines of the heading."""
    where = places(dict.fromkeys((*modules, *(change.module for change in changes))))
    found = entries(changes, where)
    sections = blocks_of(where)
    most = _MOST_LINES_OF_MANY if max(map(len, sections.values()), default=0) > _MANY else _MOST_LINES
    most -= max(taken - _HEADING, 0)
    for level in range(LEVELS):
        made = rows(found, level)
        if sum(1 for _ in _lines(made, found, sections, width)) <= most:
            break
    return made, found, sections


def summary(changes: Sequence[Change]) -> str:
    """The changes in a few words: `33 recomputed, 12 offloaded`; else the other kinds, or `no change`."""
    counts = {kind: sum(_count(change) for change in changes if change.kind == kind) for kind in KINDS}
    main = {kind: count for kind, count in counts.items() if count and kind in (RECOMPUTED, OFFLOADED)}
    told = main or {_LABELS.get(kind, kind): count for kind, count in counts.items() if count}
    return ", ".join(f"{count} {kind}" for kind, count in told.items()) or "no change"


def totals(changes: Sequence[Change]) -> str:
    """The number of changes of each kind, with the bytes and seconds of recomputations and offloads."""
    parts = []
    for kind in sorted(KINDS, key=lambda kind: kind not in (RECOMPUTED, OFFLOADED)):
        some = [change for change in changes if change.kind == kind]
        nbytes = size(sum(change.nbytes * change.times for change in some))
        more = {RECOMPUTED: f" ({nbytes} in {duration(sum(c.seconds for c in some))})", OFFLOADED: f" ({nbytes})"}
        if some:
            parts.append(f"{sum(map(_count, some))} {_LABELS.get(kind, kind)}{more.get(kind, '')}")
    return ", ".join(parts) or "no change"


def _count(change: Change) -> int:
    return change.times if change.kind in (RECOMPUTED, OFFLOADED) else 1


def _lines(
    made: Sequence[Row], found: Sequence[DiffEntry], sections: Mapping[str, Sequence[str]], width: int
) -> Iterator[Text]:
    """The rows as lines of text, with a title before each section of blocks."""
    alone = max((len(module_of(row)) for row in made if "*" not in row.section), default=0)
    shown: tuple[str, str] | None = None
    for row in made:
        blocks = sections.get(row.section, [""])
        within = "*" in row.section
        if within and (shown is None or shown[0] != row.section):
            same = [entry for entry in found if entry.place.section == row.section]
            yield from _wrapped(Text(title_of(blocks, same), style="bold"), 2, width)
        wide = max(len(module_of(other)) for other in made if other.section == row.section) if within else alone
        module = module_of(row) if shown != (row.section, row.inner) else ""
        shown = row.section, row.inner
        yield from _row(row, f"{'  ' * within}{module:<{wide}}", blocks, width)


def module_of(row: Row) -> str:
    """The module as a row shows it: the path within the block in a section of blocks, else the whole path."""
    return row.inner or "(block)" if "*" in row.section else row.section or "(model)"


def title_of(blocks: Sequence[str], found: Sequence[DiffEntry]) -> str:
    """The title of a section of blocks, such as `transformer.h.0 to h.11 (12 blocks; h.2 to h.11 like h.1)`. `found`
    are the section's entries. The title groups blocks to which the same entries apply, as many times."""
    groups: dict[frozenset[tuple[int, int]], list[str]] = defaultdict(list)
    for block in blocks:
        has = ((number, entry.by_block[block].times) for number, entry in enumerate(found) if block in entry.by_block)
        groups[frozenset(has)].append(block)
    if len(blocks) == 1:
        return blocks[0]
    named = f"{blocks[0]} {'and' if len(blocks) == 2 else 'to'} {_short(blocks[-1])}"
    same = [f"{_spans(some[1:], blocks)} like {_short(some[0])}" for some in groups.values() if len(some) > 1]
    several = "; no two are alike" if not same else ""
    return f"{named} ({len(blocks)} blocks{several}{''.join(f'; {told}' for told in same[:3])})"


def _short(block: str) -> str:
    """The number of a block with the name of its list, and what follows: `h.3` for `transformer.h.3`."""
    parts = block.split(".")
    first = next(at for at, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[max(first - 1, 0) :])


def _spans(some: Sequence[str] | frozenset[str], blocks: Sequence[str]) -> str:
    """Some of the `blocks` in words, such as `h.0, h.3 to h.7`; more than three spans as `31 of 48 blocks`."""
    runs: list[list[int]] = []
    for number in sorted(blocks.index(block) for block in some):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > 3:
        return f"{len(some)} of {len(blocks)} blocks"
    ends = ((_short(blocks[run[0]]), _short(blocks[run[-1]]), len(run)) for run in runs)
    return ", ".join({1: first, 2: f"{first}, {last}"}.get(many, f"{first} to {last}") for first, last, many in ends)


def _row(row: Row, module: str, blocks: Sequence[str], width: int) -> list[Text]:
    """A row as one line, or several where it is longer than `width`."""
    change = row.first
    label = label_of(change)
    text = Text(f"{change.sign} {module} " if change.sign else f"{module} ", style="")
    indent = 6 + text.cell_len // 2
    text.append(f"{label:<13}", style={"+": "green", "-": "red"}.get(change.sign) or _COLOURS.get(change.kind, "green"))
    text.append(f" {names_of(row, blocks)}")
    text.append(": " + facts if (facts := facts_of(row, blocks)) else "", style="none")
    lines = _wrapped(text, indent, width)
    _add_source(lines, row, indent, width)
    return lines


def _wrapped(text: Text, indent: int, width: int) -> list[Text]:
    """The text in lines of at most `width` columns, all but the first indented by `indent` columns."""
    first, *_ = text.wrap(_CONSOLE, width)
    if first.cell_len >= len(text.plain.rstrip()):
        return [text]
    rest = text[len(first.plain) :]
    while rest.plain.startswith(" "):
        rest = rest[1:]
    more = rest.wrap(_CONSOLE, max(width - indent, 20))
    first.rstrip()
    lines = [Text(" " * indent).append_text(line) for line in more]
    for line in lines:
        line.rstrip()
    return [first, *lines]


def _add_source(lines: list[Text], row: Row, indent: int, width: int) -> None:
    """Write the file and line of the user's code behind the last line of a row, and as much of the code as fits."""
    change = row.first
    if not change.source:
        return
    where = os.path.basename(change.source)
    others = len({entry.first.source for entry in row.entries}) - 1
    where += f" and {others} more" if others else ""
    if lines[-1].cell_len + len(where) + 2 > width:
        lines.append(Text(" " * indent))
    last = lines[-1]
    column = width * 5 // 8 if width >= 100 else 0
    last.append(" " * max(min(column, width - len(where) - 2) - last.cell_len, 0) + "  ").append(where, style="dim")
    room = width - last.cell_len - 2
    if room >= 10 and change.code and not others:
        code = change.code if len(change.code) <= room else f"{change.code[: room - 1]}…"
        last.append("  ").append(code, style="dim italic")


def label_of(change: Change) -> str:
    """The kind of a change, as a row shows it: for a change of dtype the two dtypes."""
    return {DTYPE: change.detail, SAVED: f"{SAVED} {change.detail}"}.get(change.kind, change.kind)


def names_of(row: Row, blocks: Sequence[str]) -> str:
    """The names of a row's operators: all for recomputations, the first few for other kinds. Where operators change in
    different blocks, their blocks follow in brackets."""
    by_blocks: dict[frozenset[str], list[str]] = defaultdict(list)
    for entry in row.entries:
        by_blocks[entry.blocks].append(entry.first.op)
    if row.first.kind != RECOMPUTED and len(row.entries) > _NAMES + 1:
        names = list(dict.fromkeys(name for some in by_blocks.values() for name in some))
        return f"{', '.join(names[:_NAMES])} and {len(names) - _NAMES} more"
    if len(by_blocks) > 3:
        return ", ".join(dict.fromkeys(entry.first.op for entry in row.entries))
    return ", ".join(
        ", ".join(dict.fromkeys(names)) + (f" [{_spans(some, blocks)}]" if some != frozenset(blocks) else "")
        for some, names in by_blocks.items()
    )


def facts_of(row: Row, blocks: Sequence[str]) -> str:
    """A phrase with the reason of a row's changes, and their bytes and time in the block where they are largest;
    `blocks` are the blocks of the row's section."""
    first = row.first
    nbytes, seconds, equal = row.figures()
    much = f"{'' if equal else 'up to '}{size(nbytes)}"
    sets = {entry.blocks for entry in row.entries}
    tail = f", in {min(map(len, sets))} to {max(map(len, sets))} of {len(blocks)} blocks" if len(sets) > 3 else ""
    if first.kind == RECOMPUTED:
        most = max(change.times for entry in row.entries for change in entry.by_block.values())
        facts = f"{much} for {duration(seconds)}{_whose(row, ', in the backward of ')}"
        return facts + (f", up to {most} times" if most > 1 else "") + tail
    if first.kind == OFFLOADED:
        return f"{much}{_whose(row, ', back for the backward of ')}{tail}"
    if first.kind == KEPT:
        return f"{much}, {first.reason}"
    if first.kind == IN_PLACE:
        return f"over {first.detail}" if len(row.entries) == 1 else "over operands that are not read again"
    reasons = list(dict.fromkeys(entry.first.reason for entry in row.entries if entry.first.reason))
    why = " ".join([*reasons[:1], *["and other reasons"] * (len(reasons) > 1)])
    if first.kind in (DTYPE, CAST):
        casts = sum(entry.first.times for entry in row.entries)
        counted = f"{casts} operand{'s' * (casts > 1)} cast " if casts else ""
        what = f"{counted}{first.detail if first.kind == CAST else ''}".strip()
        return ", ".join(part for part in (what, why) if part)
    detail = f"for {first.detail}" if first.detail and first.kind != SAVED else ""
    return ", ".join(part for part in (detail, why) if part)


def _whose(row: Row, before: str) -> str:
    """The operators in whose backward a row's values are read, two by name, after the words `before`; "" for none."""
    changes = [change for entry in row.entries for change in entry.by_block.values()]
    readers = list(dict.fromkeys(reader for change in changes for reader in change.readers))
    more = f" and {len(readers) - 2} more" if len(readers) > 2 else ""
    return f"{before}{', '.join(readers[:2])}{more}" if readers else ""

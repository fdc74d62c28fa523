"""The tables of docs/results.md: cells as Markdown, and where figures are from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def source(document: Document) -> str:
    """Return a sentence that says by what, when and where a document was measured, and its note if it has one."""
    machine = document["machine"]
    if isinstance(machine, dict):
        threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}" if "threads" in machine else ""
        machine = f"{machine['processor']}, {machine.get('cores', 2)} cores{threads}"
    note = f" {document['note'][0].upper()}{document['note'][1:]}." if document.get("note") else ""
    return f"`{document['command']}`, {document['date']}, {machine}, torch {document.get('torch', '2.13.0')}.{note}"


def percent(value: float | None) -> str:
    """Return a fraction as a percentage."""
    return "–" if value is None else f"{100 * value:.1f}%"


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"

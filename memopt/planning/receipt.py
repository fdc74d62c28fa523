"""What each lever did to a step, line by line, as on a receipt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from memopt.units import duration, size


@dataclass(frozen=True)
class ReceiptRow:
    """The step with one more lever pulled."""

    lever: str
    """Its name; empty for the step as captured."""
    peak_bytes: int
    """Of the whole step."""
    seconds: float
    """Of forward and backward, by the time model."""


def receipt_table(rows: Sequence[ReceiptRow]) -> Table:
    """Each lever's line: the peak and the time with it, and what it changed."""
    table = Table(title="Which levers are pulled", title_justify="left")
    table.add_column("lever")
    for title in ("peak", "less", "time", "added"):
        table.add_column(title, justify="right")
    before = rows[0]
    for row in rows:
        less, added = before.peak_bytes - row.peak_bytes, (row.seconds - before.seconds) / (rows[0].seconds or 1.0)
        cells = ("", "") if row is before else (_signed(less), f"{added:+.1%}")
        table.add_row(row.lever or "as captured", size(row.peak_bytes), cells[0], duration(row.seconds), cells[1])
        before = row
    return table


def _signed(nbytes: int) -> str:
    return size(nbytes) if nbytes >= 0 else f"-{size(-nbytes)}"

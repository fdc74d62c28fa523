"""The result of checking a plan's account: predicted and measured bytes of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from memopt.show.report import as_text
from memopt.units import size


@dataclass(frozen=True)
class AccountRow:
    """One row of a step's account, in bytes."""

    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Predicted less measured bytes: negative where the plan predicted too little."""
        return self.predicted_bytes - self.measured_bytes

    @property
    def difference(self) -> float:
        """The difference as a fraction of the measured bytes; infinite where these are 0."""
        if not self.difference_bytes:
            return 0.0
        return self.difference_bytes / self.measured_bytes if self.measured_bytes else math.inf


@dataclass(frozen=True)
class AccountCheck:
    """The account of a plan against a step that ran.

    `rows` overlap: "forward and backward", for instance, includes the gradients and what the forward saved.
    `total` is the peak of the whole step.
    """

    model: str
    optimizer: str
    device: str
    rows: tuple[AccountRow, ...]
    total: AccountRow

    @property
    def under(self) -> bool:
        """Whether the step held more than the plan predicted."""
        return self.total.difference_bytes < 0

    @property
    def worst(self) -> AccountRow:
        """The row with the largest difference in bytes."""
        return max((*self.rows, self.total), key=lambda row: abs(row.difference_bytes))

    def row(self, name: str) -> AccountRow:
        """The row of that name; raises `KeyError`."""
        return {row.name: row for row in (*self.rows, self.total)}[name]

    def table(self) -> str:
        """All rows with predicted and measured bytes and their difference, as text."""
        return as_text(self._table())

    def __str__(self) -> str:
        return self.table()

    def _table(self) -> Table:
        title = f"{self.model} with {self.optimizer} on {self.device}: predicted, and measured in a step"
        table = Table(title=title, title_justify="left")
        table.add_column("row")
        for column in ("predicted", "measured", "difference", ""):
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*_cells(row))
        table.add_section()
        table.add_row(*_cells(self.total))
        return table


def _cells(row: AccountRow) -> tuple[str, ...]:
    apart = row.difference_bytes
    sign = "-" if apart < 0 else "+"
    share = f"{row.difference:+.2%}" if apart and row.measured_bytes else ""
    difference = f"{sign}{size(abs(apart))}" if apart else "–"
    return row.name, size(row.predicted_bytes), size(row.measured_bytes), difference, share

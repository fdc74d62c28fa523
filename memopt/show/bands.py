"""The rows of the account as coloured bands over the time of a step, for pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memopt.account.breakdown import FETCHED, GRADIENTS, OUTPUTS, RECOMPUTED, SAVED, TEMPORARIES, WORKSPACE
from memopt.show.step import StepMemory

OTHER = "other rows"
COLOURS = {
    "parameters": "#8893a1",
    "optimizer state": "#b0b9c4",
    OTHER: "#d3d9e0",
    GRADIENTS: "#7a5ba6",
    OUTPUTS: "#b79ad6",
    SAVED: "#3f7fbf",
    FETCHED: "#c7577f",
    RECOMPUTED: "#e08a3c",
    TEMPORARIES: "#4fa08b",
    "optimizer temporaries": "#4fa08b",
    WORKSPACE: "#c9a227",
}
"""The bands from the bottom to the top, with their colours; all other rows of the account are one band."""
# The optimiser's step takes this share of the axis: its time is not known.
_OPTIMIZER_SHARE = 0.035


def band_of(row: str) -> str:
    """The band in which a row of the account is drawn."""
    return row if row in COLOURS else OTHER


def edges(memory: StepMemory) -> list[float]:
    """The seconds at which each moment begins; at the end those at which the optimiser's step is drawn to end."""
    end = memory.seconds or 1.0
    return [*(one.start for one in memory.evaluations), end, end * (1 + _OPTIMIZER_SHARE)]


def columns(memory: StepMemory, count: int, end: float) -> list[int | None]:
    """For each of `count` columns of equal width from 0 to `end` seconds, the moment in it that holds the most; None
    behind the step."""
    at: list[int | None] = [None] * count
    begins = edges(memory)
    for moment, live in enumerate(memory.live_bytes):
        first = min(count - 1, int(begins[moment] / end * count))
        last = min(count - 1, int(begins[moment + 1] / end * count))
        for column in range(first, last + 1):
            other = at[column]
            if other is None or live > memory.live_bytes[other]:
                at[column] = moment
    return at


def bands(memory: StepMemory, moments: Sequence[int | None]) -> dict[str, list[int]]:
    """The bytes of each band at some moments; bands that are empty at all of them are left out."""
    by_moment = _rows_by_moment(memory)
    found = {
        band: [by_moment[moment].get(band, 0) if moment is not None else 0 for moment in moments] for band in COLOURS
    }
    return {band: values for band, values in found.items() if any(value > 0 for value in values)}


def _rows_by_moment(memory: StepMemory) -> list[dict[str, int]]:
    born: list[list[tuple[str, int]]] = [[] for _ in range(len(memory.evaluations) + 1)]
    for kept in memory.ranges:
        born[kept.first].append((kept.kind, kept.nbytes))
        born[kept.last + 1].append((kept.kind, -kept.nbytes))
    now = _by_band(memory.resident)
    found = []
    for moment, one in enumerate(memory.evaluations):
        for kind, nbytes in born[moment]:
            now[band_of(kind)] = now.get(band_of(kind), 0) + nbytes
        found.append({**now, WORKSPACE: one.workspace_bytes})
    return [*found, _by_band(memory.optimizer)]


def _by_band(rows: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row, nbytes in rows.items():
        sums[band_of(row)] = sums.get(band_of(row), 0) + nbytes
    return sums

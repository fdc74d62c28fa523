"""Rows of the tables: figures that planning fills in and that are saved with a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleRow:
    """One module's share of a plan. Bytes are of a whole step, seconds by the time model."""

    path: str
    """Qualified name of the module; empty for operators outside of any submodule."""
    ops: int = 0
    """Operators that the module's forward runs."""
    saved_bytes: int = 0
    """Bytes that stay on the device from the forward to the backward."""
    recomputed_bytes: int = 0
    """Bytes that recomputation makes a second (or further) time."""
    recomputed_ops: int = 0
    """Operators that recomputation runs, each counted as often as it is recomputed."""
    seconds: float = 0.0
    """Seconds of the module's forward, each operator once."""
    added_seconds: float = 0.0
    """Seconds of recomputation."""
    offloaded_bytes: int = 0
    """Bytes that are copied to the host's memory and back."""


@dataclass(frozen=True)
class ReceiptRow:
    """The step with one more lever in use."""

    lever: str
    """Name of the lever; empty for the step as captured."""
    peak_bytes: int
    """Peak of the whole step."""
    seconds: float
    """Seconds of forward and backward, by the time model."""

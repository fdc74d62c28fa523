"""What a card's kernels are sized by: the grids of thread blocks, and with them the buffers that blocks share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """The multiprocessors of a card."""

    multiprocessors: int
    threads: int
    """Threads that one multiprocessor runs at once."""


LARGE = Chip(132, 2048)
"""An H100's, for cards that are not known."""

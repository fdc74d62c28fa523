"""The lever that writes results over dead operands; it is part of every rewriting where it is allowed."""

from __future__ import annotations

from memopt.levers.lever import Lever

REINPLACE = Lever(
    "reinplace",
    "Results of the backward are written over operands that are not read again.",
    "bitwise",
    "nothing; backend 'inductor' does it by itself",
    default=True,
)

"""The lever that writes results over dead operands; it is part of every rewriting where it is allowed."""

from __future__ import annotations

from memopt.levers.lever import Lever

REINPLACE = Lever(
    "reinplace",
    "Results of the backward overwrite operands that are not read again, and operators that free memory run first.",
    "bitwise",
    "nothing; backend 'inductor' does it by itself",
    default=True,
    tried_by="every plan",
)

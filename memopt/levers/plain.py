"""The lever that runs a model without a plan."""

from __future__ import annotations

from memopt.levers.lever import Lever

PLAIN = Lever(
    "plain",
    "A model whose forward cannot be captured runs as it is, without a plan.",
    "bitwise",
    "the budget is not held",
    tried_by="a call that cannot be captured",
)

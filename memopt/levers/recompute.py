"""The lever that recomputes activations; the solver finds the schedule."""

from __future__ import annotations

from memopt.levers.lever import Lever

RECOMPUTE = Lever(
    "recompute",
    "Activations are recomputed in the backward instead of saved from the forward.",
    "bitwise",
    "the time of the recomputed operators, as little of it as any schedule within the budget needs",
    default=True,
    tried_by="the solver",
)
RECOMPUTE_LEFT_OUT = f"nothing is recomputed, since allow leaves out {RECOMPUTE.name!r}"

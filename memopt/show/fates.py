"""Why a plan treats a value as it does, in a clause for each fate of `Plan.networkx`."""

from __future__ import annotations

WHY = {
    "saved": "the backward reads it, and the budget has room to hold it: recomputing it would add time",
    "recomputed": "the backward reads it, and its memory is needed for other values meanwhile; of all values to "
    "recompute, these add the least time that was found for this budget",
    "offloaded": "the backward reads it, and copying it to the host and back takes less time than recomputing it",
    "output": "the caller gets it",
    "gradient": "it is the gradient of a parameter or an input, which the optimiser reads",
    "temporary": "it is freed after its last reader, in the same half of the step that makes it",
    "alias": "it is a view of another value's memory and makes none",
    "fused": "it runs as a part of the ops that read it, and makes no memory",
    "input": "it is there before the step begins",
}

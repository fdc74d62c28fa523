"""The lever that splits a batch; `TrainStep` does it."""

from __future__ import annotations

from memopt.levers.lever import Lever

MICROBATCH = Lever(
    "microbatch",
    "TrainStep splits a batch that fits in no other way into smaller ones, never across batch normalisation.",
    "rounding",
    "smaller kernels, and dropout draws different random numbers; for TrainStep only",
    default=True,
    tried_by="TrainStep",
)

"""The lever that splits a batch; `TrainStep` does it."""

from __future__ import annotations

from memopt.levers.lever import Lever

MICROBATCH = Lever(
    "microbatch",
    "TrainStep splits a batch that does not fit otherwise into smaller ones, unless the model has batch normalisation.",
    "rounding",
    "smaller kernels, and dropout draws different random numbers; for TrainStep only",
    default=True,
    tried_by="TrainStep",
)

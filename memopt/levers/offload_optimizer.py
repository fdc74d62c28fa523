"""The lever that holds the optimizer's state in host memory."""

from __future__ import annotations

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import OffloadedOptimizer

OFFLOAD_OPTIMIZER = Lever(
    OffloadedOptimizer.title,
    "The optimizer's state is held in host memory and copied piece by piece for its step.",
    "bitwise",
    "host memory and the time of the copies; needs memopt.wrap_optimizer; not on a CPU",
    optimizer=OptimizerChange(
        OffloadedOptimizer,
        "the optimizer's state in the host's memory, copied to the device piece by piece",
        "bitwise equal to the same optimizer stepped parameter by parameter",
        offloads=True,
    ),
)

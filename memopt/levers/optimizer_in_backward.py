"""The lever that steps each parameter within the backward."""

from __future__ import annotations

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import OptimizerInBackward

OPTIMIZER_IN_BACKWARD = Lever(
    OptimizerInBackward.title,
    "Each parameter is stepped, and its gradient freed, as soon as the backward no longer reads them.",
    "bitwise",
    "no clipping by the norm of all gradients, no GradScaler, no accumulation, no TrainStep; for backend 'aten', and "
    "needs memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        OptimizerInBackward,
        "each parameter is stepped, and its gradient freed, as soon as the backward no longer reads them; no "
        "clipping by the norm of all gradients, no GradScaler, no accumulation, and plain operators only (backend "
        "'aten')",
        "bitwise equal to the same optimizer stepped parameter by parameter",
        in_backward=True,
    ),
)

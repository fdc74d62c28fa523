"""The lever that holds parameters and gradients in bfloat16."""

from __future__ import annotations

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import BF16ParametersOptimizer, use_bf16_parameters

BF16_PARAMETERS = Lever(
    BF16ParametersOptimizer.title,
    "Parameters and gradients are held in bfloat16, with stochastic rounding in the optimizer's step.",
    "approximate",
    "rounding of every update; needs a step in bf16, and memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        BF16ParametersOptimizer,
        "parameters and gradients in bfloat16, stepped in float32 and rounded stochastically",
        "weights have 8 bits of precision, rounded without bias",
        apply=use_bf16_parameters,
        narrows=True,
    ),
)

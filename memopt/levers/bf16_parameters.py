"""The lever that holds parameters and gradients in bfloat16."""

from __future__ import annotations

from functools import partial

import torch

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import BF16ParametersOptimizer, Rounding, use_bf16_parameters

_CHANGES = {
    "stochastic": "stepped in float32 and rounded stochastically",
    "compensated": "stepped in float32, with the bits left out kept as state",
}
_EXACTNESS = {
    "stochastic": "right in expectation",
    "compensated": "those stepped are the float32 ones, bit by bit",
}


def bf16_parameters(rounding: Rounding = "stochastic", state_dtype: torch.dtype = torch.float32) -> Lever:
    """The lever with a way of rounding and a dtype of the state: see `BF16ParametersOptimizer`."""
    mark = "," if rounding == "stochastic" else ";"
    return Lever(
        BF16ParametersOptimizer.title,
        "Parameters and gradients are held in bfloat16, with stochastic rounding in the optimizer's step.",
        "approximate",
        "rounding of every update; needs a step in bf16, and memopt.wrap_optimizer",
        optimizer=OptimizerChange(
            partial(BF16ParametersOptimizer, rounding=rounding, state_dtype=state_dtype),
            f"parameters and gradients in bfloat16, {_CHANGES[rounding]}",
            f"the forward sees weights with 8 bits of precision{mark} {_EXACTNESS[rounding]}",
            apply=partial(use_bf16_parameters, rounding=rounding, state_dtype=state_dtype),
            narrows=True,
        ),
    )


BF16_PARAMETERS = bf16_parameters()

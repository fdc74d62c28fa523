"""Wrappers of optimizers that hold parameters, gradients or state in less memory, and the price of their steps."""

from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer, kept_wide, use_bf16_parameters
from memopt.optimizers.optimizer_in_backward import OptimizerInBackward, SteppingHook, stepping_hooks
from memopt.optimizers.optimizer_step_price import Stepping
from memopt.optimizers.state_optimizers import LowBitOptimizer, OffloadedOptimizer, check_adam

__all__ = [
    "BF16ParametersOptimizer",
    "LowBitOptimizer",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "Stepping",
    "SteppingHook",
    "check_adam",
    "kept_wide",
    "stepping_hooks",
    "use_bf16_parameters",
]

"""Changes of the training that save memory at a price which the user has to agree to: each made only where named."""

from memopt.proposals.bf16_parameters import BF16ParametersOptimizer, Rounding, kept_wide, use_bf16_parameters
from memopt.proposals.bf16_price import propose_bf16_parameters
from memopt.proposals.in_backward_price import (
    gradients_together,
    propose_optimizer_in_backward,
    shared_parameters,
)
from memopt.proposals.low_bit_backend import Backend, use_low_bit_optimizer
from memopt.proposals.low_bit_optimizer import LowBitOptimizer
from memopt.proposals.low_bit_price import propose_low_bit_optimizer
from memopt.proposals.offload_optimizer import OffloadedOptimizer, Where
from memopt.proposals.offload_price import propose_offload_optimizer
from memopt.proposals.optimizer_in_backward import OptimizerInBackward, refuse_what_needs_all_gradients
from memopt.proposals.proposal import Proposal, StepBytes

__all__ = [
    "BF16ParametersOptimizer",
    "Backend",
    "LowBitOptimizer",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "Proposal",
    "Rounding",
    "StepBytes",
    "Where",
    "gradients_together",
    "kept_wide",
    "propose_bf16_parameters",
    "propose_low_bit_optimizer",
    "propose_offload_optimizer",
    "propose_optimizer_in_backward",
    "refuse_what_needs_all_gradients",
    "shared_parameters",
    "use_bf16_parameters",
    "use_low_bit_optimizer",
]

"""Changes of the training that save memory at a price which the user has to agree to: each made only where named."""

from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer, Rounding, kept_wide, use_bf16_parameters
from memopt.optimizers.lever_price import LeverPrice, price_levers
from memopt.optimizers.levers import Levers
from memopt.optimizers.low_bit_backend import Backend, use_low_bit_optimizer
from memopt.optimizers.low_bit_optimizer import LowBitOptimizer
from memopt.optimizers.offers import BF16_PARAMETERS, OPTIMIZER_IN_BACKWARD, OPTIMIZER_PROPOSALS, Offer, offers
from memopt.optimizers.offload_optimizer import OffloadedOptimizer, Where
from memopt.optimizers.optimizer_in_backward import (
    OptimizerInBackward,
    SteppingHook,
    refuse_what_needs_all_gradients,
    stepping_hooks,
)
from memopt.optimizers.proposal import Proposal, StepBytes
from memopt.optimizers.propose import propose
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts

__all__ = [
    "BF16_PARAMETERS",
    "OPTIMIZER_IN_BACKWARD",
    "OPTIMIZER_PROPOSALS",
    "BF16ParametersOptimizer",
    "Backend",
    "LeverPrice",
    "Levers",
    "LowBitOptimizer",
    "Offer",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "Proposal",
    "Rounding",
    "StepBytes",
    "Stepping",
    "SteppingHook",
    "TrainingFacts",
    "Where",
    "kept_wide",
    "offers",
    "price_levers",
    "propose",
    "refuse_what_needs_all_gradients",
    "stepping_hooks",
    "use_bf16_parameters",
    "use_low_bit_optimizer",
]

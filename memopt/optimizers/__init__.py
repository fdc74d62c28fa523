"""Proposals: levers that change the optimiser or the parameters' dtype, used only where `allow` names them."""

from memopt.optimizers.bf16_parameters import BF16ParametersOptimizer, Rounding, kept_wide, use_bf16_parameters
from memopt.optimizers.low_bit_optimizer import LowBitOptimizer
from memopt.optimizers.offload_optimizer import OffloadedOptimizer, Where
from memopt.optimizers.optimizer_in_backward import (
    OptimizerInBackward,
    SteppingHook,
    refuse_what_needs_all_gradients,
    stepping_hooks,
)
from memopt.optimizers.priced_proposal import PricedProposal, StepBytes
from memopt.optimizers.proposal_sets import (
    BF16_PARAMETERS,
    OPTIMIZER_IN_BACKWARD,
    OPTIMIZER_PROPOSALS,
    ProposalSet,
    Wanted,
    combinations_of,
    further_combinations,
    least_with_proposals,
)
from memopt.optimizers.proposals import Proposals
from memopt.optimizers.receipt import price_proposals
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts
from memopt.optimizers.training_price import TrainingPrice, price_training

__all__ = [
    "BF16_PARAMETERS",
    "OPTIMIZER_IN_BACKWARD",
    "OPTIMIZER_PROPOSALS",
    "BF16ParametersOptimizer",
    "LowBitOptimizer",
    "OffloadedOptimizer",
    "OptimizerInBackward",
    "PricedProposal",
    "ProposalSet",
    "Proposals",
    "Rounding",
    "StepBytes",
    "Stepping",
    "SteppingHook",
    "TrainingFacts",
    "TrainingPrice",
    "Wanted",
    "Where",
    "combinations_of",
    "further_combinations",
    "kept_wide",
    "least_with_proposals",
    "price_proposals",
    "price_training",
    "refuse_what_needs_all_gradients",
    "stepping_hooks",
    "use_bf16_parameters",
]

"""Changes of the training that save memory at a price which the user has to agree to: each made only where named."""

from memopt.proposals.bf16_parameters import BF16ParametersOptimizer, Rounding, kept_wide, use_bf16_parameters
from memopt.proposals.bf16_price import propose_bf16_parameters
from memopt.proposals.proposal import Proposal, StepBytes

__all__ = [
    "BF16ParametersOptimizer",
    "Proposal",
    "Rounding",
    "StepBytes",
    "kept_wide",
    "propose_bf16_parameters",
    "use_bf16_parameters",
]

"""memopt trains a PyTorch model within a number of gigabytes, with the gradients of the plain model, and shows how."""

from memopt.api import frontier, max_batch, max_length, optimize, plan, plan_of, remove, training_loss, wrap_optimizer
from memopt.checks import Comparison, compare
from memopt.checks.account_check import AccountCheck, AccountRow
from memopt.checks.check import check
from memopt.errors import BudgetError, CaptureError, UnplannedGradientError
from memopt.meter import measure_peak
from memopt.planning.frontier import Frontier
from memopt.planning.plan import Plan
from memopt.train import StepResult, TrainStep

__all__ = [
    "AccountCheck",
    "AccountRow",
    "BudgetError",
    "CaptureError",
    "Comparison",
    "Frontier",
    "Plan",
    "StepResult",
    "TrainStep",
    "UnplannedGradientError",
    "check",
    "compare",
    "frontier",
    "max_batch",
    "max_length",
    "measure_peak",
    "optimize",
    "plan",
    "plan_of",
    "remove",
    "training_loss",
    "wrap_optimizer",
]

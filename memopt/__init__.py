"""memopt trains a PyTorch model within a number of gigabytes, with the gradients of the plain model, and shows how."""

from memopt.api import frontier, max_batch, max_length, optimize, plan, plan_of, remove, training_loss, wrap_optimizer
from memopt.budget.account_check import AccountCheck, AccountRow
from memopt.budget.check import check
from memopt.comparison import Comparison, compare
from memopt.errors import BudgetError, CaptureError, UnplannedGradientError
from memopt.meter import measure_peak
from memopt.pareto.frontier import Frontier
from memopt.planning.plan import Plan
from memopt.step import StepResult, TrainStep

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

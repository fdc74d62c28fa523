"""Which dtype each operator computes in, and why."""

from memopt.precision.assign import AssignPrecision
from memopt.precision.devices import best_dtype, low_dtype
from memopt.precision.pipeline import precision_pipeline
from memopt.precision.plan import Choice, PrecisionPlan
from memopt.precision.rules import Rules

__all__ = ["AssignPrecision", "Choice", "PrecisionPlan", "Rules", "best_dtype", "low_dtype", "precision_pipeline"]

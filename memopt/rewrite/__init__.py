"""Decides the dtype in which each operator computes, with a reason, and runs the passes of a lever set."""

from memopt.rewrite.assign import AssignPrecision
from memopt.rewrite.policy import Choice, Policy, PrecisionPlan, Rules, best_dtype, check_policy, low_dtype

__all__ = [
    "AssignPrecision",
    "Choice",
    "Policy",
    "PrecisionPlan",
    "Rules",
    "best_dtype",
    "check_policy",
    "low_dtype",
]

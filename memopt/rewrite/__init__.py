"""Decides the dtype in which each operator computes, with a reason."""

from memopt.rewrite.assign import AssignPrecision
from memopt.rewrite.pipeline import DecidePrecision, check_rules, precision_rewriting
from memopt.rewrite.policy import Choice, Policy, PrecisionPlan, Rules, best_dtype, check_policy, low_dtype

__all__ = [
    "AssignPrecision",
    "Choice",
    "DecidePrecision",
    "Policy",
    "PrecisionPlan",
    "Rules",
    "best_dtype",
    "check_policy",
    "check_rules",
    "low_dtype",
    "precision_rewriting",
]

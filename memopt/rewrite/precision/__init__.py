"""Decides the dtype in which each operator computes, with a reason."""

from memopt.rewrite.precision.assign import AssignPrecision
from memopt.rewrite.precision.devices import Policy, best_dtype, check_policy, low_dtype
from memopt.rewrite.precision.pipeline import DecidePrecision, check_rules, precision_rewriting
from memopt.rewrite.precision.plan import Choice, PrecisionPlan
from memopt.rewrite.precision.rules import Rules

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

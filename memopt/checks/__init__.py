"""Checks of a planned step by running it: its gradients against the plain step's, its bytes against the plan's."""

from memopt.checks.compare_step import compare
from memopt.checks.comparison import Comparison

__all__ = ["Comparison", "compare"]

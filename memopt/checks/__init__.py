"""Comparisons of a planned step: with the plain step's numbers, and with the bytes that its plan predicts."""

from memopt.checks.compare_step import compare
from memopt.checks.comparison import Comparison

__all__ = ["Comparison", "compare"]

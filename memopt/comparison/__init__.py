"""One training step of the plain model, under autocast and as planned, side by side, measured against float64."""

from memopt.comparison.compare_step import compare
from memopt.comparison.comparison import Comparison

__all__ = ["Comparison", "compare"]

"""Levers on operator graphs, and the ladder on which they are pulled: one after another, until the step fits."""

from memopt.levers.ladder import OPERATOR_LEVERS, Rung, ladder

__all__ = ["OPERATOR_LEVERS", "Rung", "ladder"]

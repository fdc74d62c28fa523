"""The levers, the sets of them that plans try, and the price of those on the optimizer."""

from memopt.capture.operators import Decision, OperatorGraph
from memopt.levers.all import DEFAULT_LEVERS, LEVERS, OPTIMIZER_LEVERS, levers_named
from memopt.levers.lever import GraphChange, Lever, OptimizerChange, lever_sets
from memopt.levers.precision import precision_rewriting

__all__ = [
    "DEFAULT_LEVERS", "LEVERS", "OPTIMIZER_LEVERS", "Decision", "GraphChange", "Lever", "OperatorGraph",
    "OptimizerChange", "lever_sets", "levers_named", "precision_rewriting",
]  # fmt: skip

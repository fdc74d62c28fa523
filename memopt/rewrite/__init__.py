"""The levers that rewrite a captured step, and the sets of levers that a plan is sought with.

A lever inspects a graph and returns the passes to apply; the passes themselves are in `passes`.
"""

from memopt.rewrite.fp8 import FP8_LEVERS
from memopt.rewrite.lever_sets import OPERATOR_LEVERS, LeverSet, lever_sets
from memopt.rewrite.offload import OFFLOAD_ACTIVATIONS, offload_link

REINPLACE = "reinplace"

__all__ = [
    "FP8_LEVERS",
    "OFFLOAD_ACTIVATIONS",
    "OPERATOR_LEVERS",
    "REINPLACE",
    "LeverSet",
    "lever_sets",
    "offload_link",
]

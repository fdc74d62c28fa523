"""Levers on operator graphs, the ladder on which they are pulled, one after another, until the step fits; offload;
the name of the lever on joint graphs."""

from memopt.rewrite.fp8 import FP8_LEVERS
from memopt.rewrite.ladder import OPERATOR_LEVERS, Rung, ladder
from memopt.rewrite.offload import OFFLOAD_ACTIVATIONS, offload_link

REINPLACE = "reinplace"

__all__ = ["FP8_LEVERS", "OFFLOAD_ACTIVATIONS", "OPERATOR_LEVERS", "REINPLACE", "Rung", "ladder", "offload_link"]

"""From a captured region to what runs: who differentiates it and compiles the halves that a plan cuts it into."""

from memopt.lowering.aten import ATEN
from memopt.lowering.choice import BACKENDS, lowering_for, lowering_of_region
from memopt.lowering.inductor import INDUCTOR
from memopt.lowering.lowering import Lowered, Lowering, PartitionTraced

__all__ = [
    "ATEN",
    "BACKENDS",
    "INDUCTOR",
    "Lowered",
    "Lowering",
    "PartitionTraced",
    "lowering_for",
    "lowering_of_region",
]

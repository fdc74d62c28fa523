"""From a captured region to what runs: who differentiates it and compiles the halves that a plan cuts it into."""

from memopt.emit.aten import ATEN
from memopt.emit.choice import BACKENDS, lowering_for, lowering_of_region
from memopt.emit.inductor import INDUCTOR
from memopt.emit.lowering import Lowered, Lowering, PartitionTraced

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

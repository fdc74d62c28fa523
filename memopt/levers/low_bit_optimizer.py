"""The lever that holds Adam's moments in 8 bits."""

from __future__ import annotations

from memopt.levers.lever import Lever, OptimizerChange
from memopt.optimizers import LowBitOptimizer, check_adam

LOW_BIT_OPTIMIZER = Lever(
    LowBitOptimizer.title,
    "Adam's two moments are held in 8 bits.",
    "approximate",
    "quantization error in the moments; for Adam and AdamW only, and needs memopt.wrap_optimizer",
    optimizer=OptimizerChange(
        LowBitOptimizer,
        "Adam's moments in 8 bits, with one scale per 256 values; those of small parameters stay in float32",
        "moments rounded to about two decimal digits; trains about as with float32 moments",
        check=check_adam,
    ),
)

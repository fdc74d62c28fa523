"""The price of Adam's moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memopt.budget.optimizer_trial import OptimizerLike
from memopt.pricing.hardware_table import Hardware
from memopt.proposals.low_bit_optimizer import LowBitOptimizer
from memopt.proposals.proposal import Proposal, StepBytes
from memopt.proposals.step_price import difference, nbytes, parameterwise_price, step_price, trained


def propose_low_bit_optimizer(
    parameters: Iterable[torch.Tensor], optimizer: OptimizerLike, hardware: Hardware
) -> Proposal:
    """What `LowBitOptimizer` changes. Nothing of the model runs; `parameters` may be on "meta".

    Args:
        parameters: all of the model's, each once.
        optimizer, hardware: as for `propose_bf16_parameters`.

    Raises `ValueError` for an optimiser that is neither Adam nor AdamW.
    """
    given = list(parameters)
    learning = trained(given)
    plain = step_price(optimizer, learning, hardware)
    low = parameterwise_price(optimizer, learning, hardware, LowBitOptimizer)
    return Proposal(
        "low_bit_optimizer",
        "Adam's moments in 8 bits, with a scale for each 256 of them; those of small parameters stay in float32",
        StepBytes(nbytes(given), nbytes(learning), plain.state_bytes, plain.temporary_bytes),
        StepBytes(nbytes(given), nbytes(learning), low.state_bytes, low.temporary_bytes),
        host_bytes=0,
        added_seconds=difference(low.seconds, plain.seconds),
        exactness="moments rounded to two digits; learns about as in float32",
    )

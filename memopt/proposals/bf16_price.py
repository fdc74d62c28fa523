"""The price of parameters in bfloat16."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from memopt.budget.optimizer_trial import OptimizerLike
from memopt.pricing.hardware_table import Hardware
from memopt.proposals.bf16_parameters import BF16ParametersOptimizer, Rounding
from memopt.proposals.proposal import Proposal, StepBytes
from memopt.proposals.step_price import difference, nbytes, parameterwise_price, step_price, trained

_EXACTNESS = {
    "stochastic": "the forward sees weights of 8 bits, rounded by chance as they are stepped; right in expectation",
    "compensated": "the forward sees weights of 8 bits; what is stepped are the float32 values, bit by bit",
}


def propose_bf16_parameters(
    parameters: Iterable[torch.Tensor],
    optimizer: OptimizerLike,
    hardware: Hardware,
    *,
    rounding: Rounding = "stochastic",
    state_dtype: torch.dtype = torch.float32,
    kept: Collection[torch.Tensor] = (),
) -> Proposal:
    """What `use_bf16_parameters` changes. Nothing of the model runs; `parameters` may be on "meta".

    Args:
        parameters: all of the model's, each once, frozen ones too.
        optimizer: a class, an instance, a partial or a name, as for `memopt.optimize`; None for none.
        hardware: the device that trains.
        rounding, state_dtype: as for `BF16ParametersOptimizer`.
        kept: those that stay in float32 (`kept_wide`).

    Raises `ValueError` for an optimiser that cannot be tried.
    """
    given = list(parameters)
    wide = {id(each) for each in kept}
    narrowed = {id(each) for each in given if each.dtype is torch.float32 and id(each) not in wide}
    learning = trained(given)
    plain = step_price(optimizer, learning, hardware)
    state, temporaries, seconds = 0, 0, 0.0
    for dtype, some in (
        (torch.bfloat16, [each for each in learning if id(each) in narrowed]),
        (None, [each for each in learning if id(each) not in narrowed]),
    ):
        found = parameterwise_price(
            optimizer,
            some,
            hardware,
            lambda inner: BF16ParametersOptimizer(inner, rounding, state_dtype=state_dtype),
            dtype,
        )
        state, seconds = state + found.state_bytes, seconds + found.seconds
        temporaries = max(temporaries, found.temporary_bytes)
    halved = [each for each in given if id(each) in narrowed]
    after = StepBytes(
        nbytes(given) - nbytes(halved) // 2, nbytes(learning) - nbytes(trained(halved)) // 2, state, temporaries
    )
    return Proposal(
        "bf16_parameters",
        f"parameters and gradients in bfloat16, stepped in float32 with {rounding} rounding",
        StepBytes(nbytes(given), nbytes(learning), plain.state_bytes, plain.temporary_bytes),
        after,
        host_bytes=0,
        added_seconds=difference(seconds, plain.seconds),
        exactness=_EXACTNESS[rounding],
    )

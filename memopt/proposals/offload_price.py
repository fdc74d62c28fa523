"""The price of optimiser state in the host's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from memopt.budget.optimizer_account import optimizer_account
from memopt.budget.optimizer_trial import OptimizerLike
from memopt.pricing.hardware_table import Hardware
from memopt.pricing.hardware_table import hardware as hardware_named
from memopt.proposals.offload_optimizer import OffloadedOptimizer, Where
from memopt.proposals.one_parameter import PIECE_ELEMENTS
from memopt.proposals.proposal import Proposal, StepBytes
from memopt.proposals.step_price import (
    StepPrice,
    device_type,
    difference,
    nbytes,
    parameterwise_price,
    prices_of_each,
    step_price,
    trained,
)
from memopt.solver.link import Link

_WORDS = {
    "device": ("brought to the device piece by piece", "bitwise that of the same optimizer, parameter by parameter"),
    "host": ("and stepped there", "the same arithmetic, rounded as the host's units do"),
}


def propose_offload_optimizer(
    parameters: Iterable[torch.Tensor],
    optimizer: OptimizerLike,
    hardware: Hardware,
    link: Link,
    *,
    update: Where = "device",
    host: Hardware | None = None,
) -> Proposal:
    """What `OffloadedOptimizer` changes. Nothing of the model runs; `parameters` may be on "meta".

    Args:
        parameters: all of the model's, each once.
        optimizer, hardware: as for `propose_bf16_parameters`.
        link: the road between device and host; copies of both ways wait for each other.
        update: as for `OffloadedOptimizer`.
        host: what steps with update="host"; by default the table's guess for this machine's CPU.
    """
    given = list(parameters)
    learning = trained(given)
    plain = step_price(optimizer, learning, hardware)
    each = prices_of_each(optimizer, learning, hardware, lambda inner: OffloadedOptimizer(inner, update), home="cpu")
    temporaries = max((price.temporary_bytes for price in each), default=0)
    stepping = hardware if update == "device" else host or hardware_named("cpu")
    seconds = parameterwise_price(optimizer, learning, stepping).seconds + sum(
        _copy_seconds(parameter, price, link, update) for parameter, price in zip(learning, each, strict=True)
    )
    pinned = update == "device" and device_type(hardware) == "cuda"
    host_bytes = sum(_host_bytes(parameter, price, pinned) for parameter, price in zip(learning, each, strict=True))
    where, exactness = _WORDS[update]
    return Proposal(
        "offload_optimizer",
        f"the optimizer's state in the host's memory, {where}",
        StepBytes(nbytes(given), nbytes(learning), plain.state_bytes, plain.temporary_bytes),
        StepBytes(
            nbytes(given),
            nbytes(learning),
            _scalars(optimizer, learning, hardware) if update == "device" else 0,
            temporaries if update == "device" else 0,
        ),
        host_bytes=host_bytes + (temporaries if update == "host" else 0),
        added_seconds=difference(seconds, plain.seconds),
        exactness=exactness,
    )


def _copy_seconds(parameter: torch.Tensor, price: StepPrice, link: Link, update: Where) -> float:
    """Seconds of the link for one parameter: its state there and back, or parameter and gradient there and one back."""
    size = nbytes([parameter])
    bytes_moved, tensors = 3 * size, 3
    if update == "device":
        bytes_moved, tensors = 2 * price.state_bytes, 2 * _tensors(parameter, price)
    if not tensors:
        return 0.0
    copies = tensors * max(1, math.ceil(parameter.numel() / PIECE_ELEMENTS))
    return copies * link.transfer_seconds(math.ceil(bytes_moved / copies))


def _tensors(parameter: torch.Tensor, price: StepPrice) -> int:
    """How many tensors of the parameter's size its state is about."""
    return round(price.state_bytes / max(1, nbytes([parameter])))


def _host_bytes(parameter: torch.Tensor, price: StepPrice, pinned: bool) -> int:
    """Torch's allocator of pinned memory gives each tensor a power of two."""
    tensors = _tensors(parameter, price)
    if not pinned or not tensors:
        return price.state_bytes
    return max(price.state_bytes, tensors * 2 ** math.ceil(math.log2(max(1, price.state_bytes / tensors))))


def _scalars(optimizer: OptimizerLike, learning: Sequence[torch.Tensor], hardware: Hardware) -> int:
    """Fused kernels read the number of the step on the device, one for each parameter."""
    if device_type(hardware) == "cpu" or optimizer is None:
        return 0
    fused = optimizer_account(optimizer, learning, device_type(hardware)).name.endswith("(fused)")
    return 4 * len(learning) if fused else 0

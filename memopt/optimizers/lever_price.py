"""Bytes and seconds of an optimiser with proposals around it, whichever are taken together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memopt.account.caching_allocator import ROUNDING_BYTES
from memopt.optimizers.levers import Levers
from memopt.optimizers.one_parameter import PIECE_ELEMENTS
from memopt.optimizers.proposal import StepBytes
from memopt.optimizers.step_price import StepPrice, device_type, nbytes, prices_of_each, step_price
from memopt.optimizers.stepping import Stepping
from memopt.optimizers.training_facts import TrainingFacts, trained


@dataclass(frozen=True)
class LeverPrice:
    """Of training with some levers: bytes on the device and on the host, seconds of an optimiser's step."""

    device: StepBytes
    host_bytes: int
    seconds: float
    stepping: Stepping | None = None
    """With the optimiser in the backward: what each of its steps takes there."""


def price_levers(facts: TrainingFacts, levers: Levers) -> LeverPrice:
    """The rows of the account that `levers` move. Nothing of the model runs: the optimiser does, on fake tensors.

    With the optimiser in the backward, gradients and temporaries are those at the worst moment, which is then within
    the backward, beside the activations still held: a guess by the model's modules, for which a plan has the graph.

    Raises `ValueError` for an optimiser that cannot be tried, or that the levers do not fit.
    """
    if not levers.names:
        plain = step_price(facts.optimizer, facts.trained, facts.hardware)
        sizes = nbytes(facts.parameters), nbytes(facts.trained)
        return LeverPrice(StepBytes(*sizes, plain.state_bytes, plain.temporary_bytes), 0, plain.seconds)
    dtypes = {id(each): _dtype(each, facts, levers) for each in facts.parameters}
    learning = [dtypes[id(each)] for each in facts.trained]
    alone = levers.only([name for name in levers.names if name != "offload_optimizer"])
    on_host = levers.offload_optimizer == "host"
    stepping = facts.stepping_host if on_host else facts.hardware
    each = prices_of_each(facts.optimizer, facts.trained, learning, stepping, alone.wrap)
    state, host_bytes, seconds = sum(price.state_bytes for price in each), 0, sum(price.seconds for price in each)
    temporaries = [price.temporary_bytes for price in each]
    if levers.offload_optimizer:
        each = prices_of_each(facts.optimizer, facts.trained, learning, facts.hardware, levers.wrap, device="cpu")
        temporaries = [0 if on_host else price.temporary_bytes for price in each]
        state = 0 if on_host else _scalars(facts)
        host_bytes = sum(_host_bytes(price, facts, levers) for price in each)
        host_bytes += max((price.temporary_bytes for price in each), default=0) if on_host else 0
        seconds += sum(
            _copy_seconds(_size(parameter, dtype), parameter.numel(), price, facts, levers)
            for parameter, dtype, price in zip(facts.trained, learning, each, strict=True)
        )
    gradients, stepped = _gradients(facts, dtypes, temporaries, levers)
    parameters = sum(_size(parameter, dtypes[id(parameter)]) for parameter in facts.parameters)
    each_stepped = zip(facts.trained, learning, temporaries, strict=True)
    in_backward = Stepping.of(each_stepped) if levers.optimizer_in_backward else None
    return LeverPrice(StepBytes(parameters, gradients, state, stepped), host_bytes, seconds, in_backward)


def _dtype(parameter: torch.Tensor, facts: TrainingFacts, levers: Levers) -> torch.dtype:
    narrow = levers.bf16_parameters and parameter.dtype is torch.float32
    return torch.bfloat16 if narrow and all(parameter is not each for each in facts.wide) else parameter.dtype


def _size(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return parameter.numel() * dtype.itemsize


def _gradients(
    facts: TrainingFacts, dtypes: dict[int, torch.dtype], temporaries: Sequence[int], levers: Levers
) -> tuple[int, int]:
    """Bytes of gradients and of a step's temporaries when their sum is largest."""
    sizes = {id(each): _size(each, dtypes[id(each)]) for each in facts.trained}
    if not levers.optimizer_in_backward:
        return sum(sizes.values()), max(temporaries, default=0)
    stepping = {id(each): nbytes for each, nbytes in zip(facts.trained, temporaries, strict=True)}
    shared = trained(facts.shared)
    waiting, held = sum(sizes[id(each)] for each in shared), {id(each) for each in shared}
    moments = [(waiting, stepping[id(each)]) for each in shared]
    for group in facts.together or [(each,) for each in facts.trained]:
        own = [id(each) for each in trained(group) if id(each) not in held]
        if own:
            moments.append((waiting + sum(sizes[each] for each in own), max(stepping[each] for each in own)))
    return max(moments, key=sum, default=(0, 0))


def _host_bytes(price: StepPrice, facts: TrainingFacts, levers: Levers) -> int:
    """What the state of a parameter takes on the host: torch's allocator of pinned memory gives powers of two."""
    if levers.offload_optimizer == "host" or device_type(facts.hardware) == "cpu":
        return price.state_bytes
    rounded = sum(2 ** math.ceil(math.log2(array)) for array in price.arrays if array)
    return rounded + price.state_bytes - sum(price.arrays)


def _copy_seconds(size: int, elements: int, price: StepPrice, facts: TrainingFacts, levers: Levers) -> float:
    """Seconds of the link for a parameter: its state there and back, or itself and its gradient there and it back;
    one copy waits for the other."""
    bytes_moved, tensors = 3 * size, 3
    if levers.offload_optimizer == "device":
        bytes_moved, tensors = 2 * sum(price.arrays), 2 * len(price.arrays)
    if not bytes_moved:
        return 0.0
    copies = tensors * max(1, math.ceil(elements / PIECE_ELEMENTS))
    return copies * facts.link.transfer_seconds(math.ceil(bytes_moved / copies))


def _scalars(facts: TrainingFacts) -> int:
    """Fused kernels read the number of the step on the device, one for each parameter, in a block of its own."""
    if device_type(facts.hardware) == "cpu" or not facts.fused:
        return 0
    return ROUNDING_BYTES * len(facts.trained)

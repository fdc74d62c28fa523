"""The time and memory of levers that wrap the optimizer, and the properties of a training run that they depend on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import OptimizerLike
from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.levers.lever import OptimizerChange
from memopt.optimizers.bf16_parameters import kept_wide
from memopt.optimizers.optimizer_step_price import (
    OptimizerStepPrice,
    Stepping,
    nbytes,
    optimizer_step_price,
    prices_of_each,
)
from memopt.optimizers.parameterwise import PIECE_ELEMENTS


@dataclass(frozen=True)
class TrainingFacts:
    """What the bytes and seconds of training with levers on the optimizer depend on: parameters, optimizer and
    hardware. Parameters may be on "meta"."""

    parameters: tuple[torch.Tensor, ...]
    """All parameters of the model, each once, frozen ones too."""
    optimizer: OptimizerLike
    """A class, an instance (over these parameters), a partial, a name or None, as for `memopt.optimize`."""
    hardware: Hardware
    """The device that trains."""
    wide: tuple[torch.Tensor, ...] = ()
    """Parameters that stay in float32 (`kept_wide`)."""
    together: tuple[tuple[torch.Tensor, ...], ...] | None = None
    """Groups of parameters whose gradients a backward makes at once, those of a module; None: each gradient alone."""
    shared: tuple[torch.Tensor, ...] = ()
    """Parameters used at several places, whose gradients are complete only after the last use."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: OptimizerLike, hardware: Hardware) -> TrainingFacts:
        """The facts of training `model` with this optimizer on this hardware."""
        return cls(
            tuple(model.parameters()),
            optimizer,
            hardware,
            wide=tuple(kept_wide(model)),
            together=tuple(_together(model)),
            shared=tuple(_shared(model)),
        )

    @property
    def trained(self) -> list[torch.Tensor]:
        """The parameters that require gradients."""
        return trained(self.parameters)

    @cached_property
    def fused(self) -> bool:
        """Whether the optimizer uses fused kernels on the device."""
        return optimizer_account(self.optimizer, self.trained, self.hardware.device_type).name.endswith("(fused)")


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of the parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def _together(model: nn.Module) -> list[tuple[nn.Parameter, ...]]:
    """The parameters of each module by itself, whose gradients one operator may make at once."""
    return [found for module in model.modules() if (found := tuple(module.parameters(recurse=False)))]


def _shared(model: nn.Module) -> list[nn.Parameter]:
    """Parameters at several places of the model, like tied embeddings."""
    places = Counter(id(parameter) for group in _together(model) for parameter in group)
    return [parameter for parameter in model.parameters() if places[id(parameter)] > 1]


@dataclass(frozen=True)
class TrainingPrice:
    """The bytes that training with some levers holds, by the rows of a step's account, and the seconds of
    `optimizer.step()`."""

    parameters: int
    gradients: int
    optimizer_state: int
    optimizer_temporaries: int
    host_bytes: int
    seconds: float
    stepping: Stepping | None = None
    """With the optimizer in the backward, the bytes that stepping each kind of parameter takes there; else None."""
    state_blocks: tuple[int, ...] = ()
    """The bytes of each tensor of the optimizer's state on a GPU, in the order of the parameters."""

    @property
    def rows(self) -> dict[str, int]:
        """Bytes on the device, by the name of the account's row."""
        names = ("parameters", "gradients", "optimizer_state", "optimizer_temporaries")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        """The sum of the rows: bytes on the device."""
        return sum(self.rows.values())


def price_training(facts: TrainingFacts, changes: Sequence[OptimizerChange]) -> TrainingPrice:
    """The bytes and seconds of training with the optimizer wrapped by `changes`, the innermost first, found by stepping
    it on fake tensors.

    Where parameters are stepped within the backward, gradients and temporaries count at the moment of the backward when
    their sum is largest. That moment is estimated from the model's modules here; a plan finds it in the graph.

    Raises `ValueError` for an optimizer that cannot be tried on fake tensors, or that the levers do not fit."""
    if not changes:
        plain = optimizer_step_price(facts.optimizer, facts.trained, facts.hardware)
        sizes = nbytes(facts.parameters), nbytes(facts.trained)
        return TrainingPrice(*sizes, plain.state_bytes, plain.temporary_bytes, 0, plain.seconds)
    dtypes = {id(parameter): _dtype(parameter, facts, changes) for parameter in facts.parameters}
    learning = [dtypes[id(parameter)] for parameter in facts.trained]
    offloads, in_backward = any(change.offloads for change in changes), any(change.in_backward for change in changes)
    wraps = tuple(change.wrap for change in changes)
    alone = tuple(change.wrap for change in changes if not change.offloads)
    prices = prices_of_each(facts.optimizer, facts.trained, learning, facts.hardware, alone)
    state, host_bytes, seconds = sum(price.state_bytes for price in prices), 0, sum(price.seconds for price in prices)
    temporaries = [price.temporary_bytes for price in prices]
    blocks = tuple(nbytes for price in prices for nbytes in price.arrays)
    if offloads:
        prices = prices_of_each(facts.optimizer, facts.trained, learning, facts.hardware, wraps, device=HOST.type)
        temporaries = [price.temporary_bytes for price in prices]
        state, blocks = _scalars(facts), ()
        host_bytes = sum(_host_bytes(price, facts) for price in prices)
        pairs = zip(facts.trained, prices, strict=True)
        seconds += sum(_copy_seconds(parameter.numel(), price, facts) for parameter, price in pairs)
    gradients, stepped = _gradients(facts, dtypes, temporaries, in_backward)
    parameters = sum(_size(parameter, dtypes[id(parameter)]) for parameter in facts.parameters)
    stepped_alone = zip(facts.trained, learning, temporaries, strict=True)
    inside = Stepping.of(stepped_alone) if in_backward else None
    return TrainingPrice(parameters, gradients, state, stepped, host_bytes, seconds, inside, blocks)


def _dtype(parameter: torch.Tensor, facts: TrainingFacts, changes: Sequence[OptimizerChange]) -> torch.dtype:
    narrow = any(change.narrows for change in changes) and parameter.dtype is torch.float32
    return torch.bfloat16 if narrow and all(parameter is not wide for wide in facts.wide) else parameter.dtype


def _size(parameter: torch.Tensor, dtype: torch.dtype) -> int:
    return parameter.numel() * dtype.itemsize


def _gradients(
    facts: TrainingFacts, dtypes: dict[int, torch.dtype], temporaries: Sequence[int], in_backward: bool
) -> tuple[int, int]:
    """Bytes of gradients and of the optimizer's temporaries at the moment when their sum is largest."""
    sizes = {id(parameter): _size(parameter, dtypes[id(parameter)]) for parameter in facts.trained}
    if not in_backward:
        return sum(sizes.values()), max(temporaries, default=0)
    stepping = {id(parameter): nbytes for parameter, nbytes in zip(facts.trained, temporaries, strict=True)}
    shared = trained(facts.shared)
    held = {id(parameter) for parameter in shared}
    waiting = sum(sizes[number] for number in held)
    moments = [(waiting, stepping[number]) for number in held]
    for group in facts.together or [(parameter,) for parameter in facts.trained]:
        own = [id(parameter) for parameter in trained(group) if id(parameter) not in held]
        if own:
            moments.append((waiting + sum(sizes[number] for number in own), max(stepping[number] for number in own)))
    return max(moments, key=sum, default=(0, 0))


def _host_bytes(price: OptimizerStepPrice, facts: TrainingFacts) -> int:
    """Bytes of a parameter's state on the host: torch's allocator of pinned memory rounds up to powers of two."""
    if device_of(facts.hardware).is_host:
        return price.state_bytes
    rounded = sum(2 ** math.ceil(math.log2(array)) for array in price.arrays if array)
    return rounded + price.state_bytes - sum(price.arrays)


def _copy_seconds(elements: int, price: OptimizerStepPrice, facts: TrainingFacts) -> float:
    """Seconds that the copies of a parameter's state to the device and back take, one after the other."""
    bytes_moved, tensors = 2 * sum(price.arrays), 2 * len(price.arrays)
    if not bytes_moved:
        return 0.0
    copies = tensors * max(1, math.ceil(elements / PIECE_ELEMENTS))
    return copies * facts.hardware.link.transfer_seconds(math.ceil(bytes_moved / copies))


def _scalars(facts: TrainingFacts) -> int:
    """Bytes of the step numbers that fused kernels keep on the device, a block for each parameter."""
    if device_of(facts.hardware).is_host or not facts.fused:
        return 0
    return device_of(facts.hardware).block_bytes * len(facts.trained)

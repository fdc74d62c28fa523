"""Bytes and seconds of an optimiser's step, found by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import optim

from memopt.budget.live_bytes import LiveBytes
from memopt.budget.optimizer_account import optimizer_account
from memopt.budget.optimizer_trial import OptimizerLike, fakes_of, trial
from memopt.pricing.hardware_table import Hardware
from memopt.pricing.op_call import tensors_in
from memopt.pricing.time_model import op_seconds
from memopt.proposals.one_parameter import PIECE_ELEMENTS, is_dense
from memopt.proposals.parameterwise import Parameterwise, goes_in_pieces
from memopt.torch_compat import FakeTensorMode, eager_optimizers, plain_tensors

Wrap: TypeAlias = Callable[[optim.Optimizer], optim.Optimizer]


@dataclass(frozen=True)
class StepPrice:
    """Of one `optimizer.step()` on the device."""

    state_bytes: int
    temporary_bytes: int
    seconds: float


def step_price(optimizer: OptimizerLike, parameters: Sequence[torch.Tensor], hardware: Hardware) -> StepPrice:
    """The price of the plain step over trained `parameters`, whose values are not looked at ("meta" will do).

    Raises `ValueError` as `optimizer_account` does.
    """
    account = optimizer_account(optimizer, parameters, device_type(hardware))
    if optimizer is None:
        return StepPrice(0, 0, 0.0)
    seconds = _seconds(_maker(optimizer, parameters), parameters, hardware)
    return StepPrice(account.state_bytes, account.step_temporary_bytes, seconds)


def parameterwise_price(
    optimizer: OptimizerLike,
    parameters: Sequence[torch.Tensor],
    hardware: Hardware,
    wrap: Wrap = lambda inner: inner,
    dtype: torch.dtype | None = None,
) -> StepPrice:
    """The price of stepping `parameters` one by one, with `wrap` around the optimiser and the parameters in `dtype`:
    state and seconds add up, temporaries are the largest."""
    found = prices_of_each(optimizer, parameters, hardware, wrap, dtype)
    return StepPrice(
        sum(each.state_bytes for each in found),
        max((each.temporary_bytes for each in found), default=0),
        sum(each.seconds for each in found),
    )


def prices_of_each(
    optimizer: OptimizerLike,
    parameters: Sequence[torch.Tensor],
    hardware: Hardware,
    wrap: Wrap = lambda inner: inner,
    dtype: torch.dtype | None = None,
    home: str | None = None,
) -> list[StepPrice]:
    """As `parameterwise_price`, for each parameter. Each is on its own, so one of a kind is tried for all.

    With `home="cpu"` what lies with the host is counted as well, by the kernels of the CPU.
    """
    if optimizer is None:
        return [StepPrice(0, 0, 0.0) for _ in parameters]
    tried: dict[Any, StepPrice] = {}
    kinds = [(_group_number(optimizer, each), each.shape, each.stride(), each.dtype) for each in parameters]
    for kind, parameter in zip(kinds, parameters, strict=True):
        if kind not in tried:
            tried[kind] = _price_of_one(optimizer, parameter, hardware, wrap, dtype or parameter.dtype, home)
    return [tried[kind] for kind in kinds]


def _price_of_one(
    optimizer: OptimizerLike,
    parameter: torch.Tensor,
    hardware: Hardware,
    wrap: Wrap,
    dtype: torch.dtype,
    home: str | None,
) -> StepPrice:
    """One of more than three pieces is tried with two and with three: each further one adds what the third did."""
    make = _maker(optimizer, [parameter], wrap)

    def tried(stand_in: torch.Tensor) -> StepPrice:
        account = optimizer_account(make, [stand_in], home or device_type(hardware))
        return StepPrice(account.state_bytes, account.step_temporary_bytes, _seconds(make, [stand_in], hardware))

    pieces, rest = divmod(parameter.numel(), PIECE_ELEMENTS)
    known = isinstance(optimizer, optim.Optimizer) and bool(optimizer.state.get(parameter))
    if pieces <= 3 or known or not is_dense(parameter) or not _goes_in_pieces(make):
        return tried(_meta(parameter.shape, parameter.stride(), dtype))
    two, three = (tried(_meta((many * PIECE_ELEMENTS + rest,), (1,), dtype)) for many in (2, 3))
    return StepPrice(
        two.state_bytes + (pieces - 2) * (three.state_bytes - two.state_bytes),
        three.temporary_bytes,
        two.seconds + (pieces - 2) * (three.seconds - two.seconds),
    )


def _goes_in_pieces(make: Callable[..., optim.Optimizer]) -> bool:
    made = make([torch.nn.Parameter(torch.zeros(1))])
    return isinstance(made, Parameterwise) and goes_in_pieces(made.inner)


def device_type(hardware: Hardware) -> str:
    """The kind of torch device that an entry of the hardware table is."""
    return "cpu" if hardware.name == "cpu" else "cuda"


def difference(seconds: float, before: float) -> float:
    """In whole nanoseconds: sums of floats differ by their order."""
    return round(seconds - before, 9)


def trained(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _maker(
    optimizer: OptimizerLike, originals: Sequence[torch.Tensor], wrap: Wrap = lambda inner: inner
) -> Callable[[list[torch.nn.Parameter]], optim.Optimizer]:
    """Makes the optimiser over stand-ins for the originals, in their order."""

    def make(stand_ins: list[torch.nn.Parameter]) -> optim.Optimizer:
        named = {id(original): each for original, each in zip(originals, stand_ins, strict=True)}
        return wrap(trial(optimizer, named, stand_ins[0].device))

    return make


def _meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_()


def _group_number(optimizer: OptimizerLike, parameter: torch.Tensor) -> int:
    """The group of a given instance that the parameter is in; groups may have other options."""
    if not isinstance(optimizer, optim.Optimizer):
        return 0
    for number, group in enumerate(optimizer.param_groups):
        if any(each is parameter for each in group["params"]):
            return number
    raise ValueError(
        f"a parameter of shape {tuple(parameter.shape)} is not in the optimizer given; give it those of it"
    )


def _seconds(make: Callable[..., optim.Optimizer], parameters: Sequence[torch.Tensor], hardware: Hardware) -> float:
    """The second step's kernels by their traffic: the first makes the state."""
    if not parameters:
        return 0.0
    traffic = _Traffic(hardware)
    foreach = device_type(hardware) != "cpu"
    with plain_tensors(), FakeTensorMode(allow_non_fake_inputs=True), eager_optimizers(foreach=foreach):
        on_fakes = make(list(fakes_of(parameters, torch.device("cpu")).values()))
        with traffic:
            on_fakes.step()
            traffic.seconds = 0.0
            on_fakes.step()
    return traffic.seconds


class _Traffic(LiveBytes):  # type: ignore[no-untyped-call]
    """Adds up the seconds of kernels that read their tensors and write theirs; single numbers cost nothing."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__("cuda", "cpu")  # no kernel of the CPU is run to find its workspace
        self.hardware = hardware
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read = list(tensors_in((args, list((kwargs or {}).values()))))
        written = [
            tensor
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tensors_in(value)
        ]
        if not func._schema.is_mutable:
            held = {tensor.untyped_storage() for tensor in read}
            written = [tensor for tensor in tensors_in(result) if tensor.untyped_storage() not in held]
        if written and max(tensor.numel() for tensor in written) > 1:
            dtype = str(written[0].dtype).removeprefix("torch.")
            self.seconds += op_seconds(0, nbytes([*read, *written]), dtype, self.hardware)
        return result

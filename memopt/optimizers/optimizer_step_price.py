"""The price of `optimizer.step()`: bytes and seconds, found by running it on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import optim

from memopt.account.eager_bytes import EagerBytes
from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import OptimizerLike, on_meta, optimizer_on_fakes, state_tensors, step, trial
from memopt.compat.host import HOST
from memopt.compat.operators import schema_of
from memopt.device.cuda import CUDA
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.device.op_call import tensors_in
from memopt.device.time_model import op_seconds
from memopt.optimizers.parameterwise import PIECE_ELEMENTS, Parameterwise, goes_in_pieces, is_dense

Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a parameter; stepping parameters of the same kind costs the same."""


@dataclass(frozen=True)
class Stepping:
    """The cost of stepping parameters one by one within the backward of a region: the temporary bytes of each step,
    and which parameters are stepped at the end only."""

    temporaries: tuple[tuple[Kind, int], ...]
    """For each kind of parameter, the most bytes alive at once among those that its step makes and frees."""
    left: frozenset[int] = frozenset()
    """Numbers of the region's inputs (parameters) that are stepped at the backward's end all the same."""

    @classmethod
    def of(cls, parameters: Iterable[tuple[torch.Tensor, torch.dtype, int]]) -> Stepping:
        """The `Stepping` of parameters that are given as tuples: (parameter, its dtype when it is stepped, temporary
        bytes of its step). Of parameters with equal shape, strides and dtype, the largest number of bytes counts."""
        most: dict[Kind, int] = {}
        for parameter, dtype, nbytes in parameters:
            kind = tuple(parameter.shape), parameter.stride(), dtype
            most[kind] = max(most.get(kind, 0), nbytes)
        return cls(tuple(most.items()))

    def leaving(self, left: Iterable[int]) -> Stepping:
        """A copy in which further parameters, the region's inputs with the numbers `left`, are stepped at the end."""
        return replace(self, left=self.left | frozenset(left))

    def workspace_bytes(self, value: Any) -> int | None:
        """The temporary bytes of stepping the parameter whose fake tensor, as an input of the graph, is `value`; None
        if no parameter that is stepped has its shape, strides and dtype."""
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            return None
        return dict(self.temporaries).get((tuple(value.shape), value.stride(), value.dtype))


Wraps: TypeAlias = tuple[Callable[[Any], optim.Optimizer], ...]
"""The wrappers that are put around an optimizer, the innermost first."""


@dataclass(frozen=True)
class OptimizerStepPrice:
    """Bytes of state that `optimizer.step()` keeps, temporary bytes that it makes and frees, and its seconds."""

    state_bytes: int
    temporary_bytes: int
    seconds: float
    arrays: tuple[int, ...] = ()
    """Bytes of each tensor of the state that is not 0-dimensional."""


NOTHING = OptimizerStepPrice(0, 0, 0.0)


_Trial: TypeAlias = tuple[OptimizerStepPrice, tuple[tuple[int, str], ...]]
"""The price of a step without its seconds; and for each of its kernels the bytes that it reads and writes, and their
dtype, from which the seconds follow on any hardware."""


def _on(hardware: Hardware, tried: _Trial) -> OptimizerStepPrice:
    price, traffic = tried
    return replace(price, seconds=sum(op_seconds(0, nbytes, dtype, hardware) for nbytes, dtype in traffic))


def optimizer_step_price(
    optimizer: OptimizerLike, parameters: Sequence[torch.Tensor], hardware: Hardware
) -> OptimizerStepPrice:
    """The bytes and seconds of stepping all trained `parameters`, whose values are not read, by the plain optimizer.
    Raises `ValueError` for an unknown name, for LBFGS, for an optimizer that cannot be made from the parameters alone,
    and for one whose steps cannot be run on fake tensors."""
    if optimizer is None or not parameters:
        return NOTHING
    make, device = _maker(optimizer, parameters), device_of(hardware)
    return _on(hardware, _tried(make, parameters, device.type, foreach=device.foreach))


def prices_of_each(
    optimizer: OptimizerLike,
    parameters: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    hardware: Hardware,
    wraps: Wraps = (),
    device: str | None = None,
) -> list[OptimizerStepPrice]:
    """The bytes and seconds of stepping each parameter alone, in the dtype that `dtypes` gives for it, with the
    optimizer wrapped by `wraps`. Stepping them one after the other takes the sum of states and seconds, and the largest
    temporaries. Of parameters with equal group, shape, strides and dtypes, only one is tried. `device` is the type of
    device on which the step runs, and whose memory is counted; by default that of the hardware."""
    if optimizer is None:
        return [NOTHING for _ in parameters]
    device = device or hardware.device_type
    tried: dict[Any, OptimizerStepPrice] = {}
    found = []
    for parameter, dtype in zip(parameters, dtypes, strict=True):
        kind = (_group_number(optimizer, parameter), parameter.shape, parameter.stride(), parameter.dtype, dtype)
        if kind not in tried:
            tried[kind] = _price_of_one(optimizer, parameter, dtype, hardware, wraps, device)
        found.append(tried[kind])
    return found


def _price_of_one(
    optimizer: OptimizerLike, parameter: torch.Tensor, dtype: torch.dtype, hardware: Hardware, wraps: Wraps, device: str
) -> OptimizerStepPrice:
    """The price of stepping one parameter. A parameter of more than three pieces is tried with two and with three:
    every further piece adds as much as the third."""
    make = _maker(optimizer, [parameter], wraps)
    foreach = device_of(hardware).foreach

    def price(shape: Sequence[int], stride: Sequence[int]) -> OptimizerStepPrice:
        if isinstance(optimizer, (str, type)):
            threads = torch.get_num_threads()
            tried = _trial_of_class(optimizer, wraps, tuple(shape), tuple(stride), dtype, device, foreach, threads)
        else:
            tried = _tried(make, [on_meta(shape, stride, dtype)], device, foreach=foreach)
        return _on(hardware, tried)

    pieces, rest = divmod(parameter.numel(), PIECE_ELEMENTS)
    known = isinstance(optimizer, optim.Optimizer) and bool(optimizer.state.get(parameter))
    if pieces <= 3 or known or not is_dense(parameter) or not _goes_in_pieces(make):
        return price(parameter.shape, parameter.stride())
    two, three = (price((many * PIECE_ELEMENTS + rest,), (1,)) for many in (2, 3))
    return OptimizerStepPrice(
        two.state_bytes + (pieces - 2) * (three.state_bytes - two.state_bytes),
        three.temporary_bytes,
        two.seconds + (pieces - 2) * (three.seconds - two.seconds),
        tuple(a + (pieces - 2) * (b - a) for a, b in zip(two.arrays, three.arrays, strict=True)),
    )


def _goes_in_pieces(make: Callable[..., optim.Optimizer]) -> bool:
    made = make([torch.nn.Parameter(torch.zeros(1))])
    return isinstance(made, Parameterwise) and goes_in_pieces(made.inner)


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _maker(
    optimizer: OptimizerLike, originals: Sequence[torch.Tensor], wraps: Wraps = ()
) -> Callable[[list[torch.nn.Parameter]], optim.Optimizer]:
    """A function that makes the optimizer, with `wraps` around it, over stand-ins for the originals, in their order."""

    def make(stand_ins: list[torch.nn.Parameter]) -> optim.Optimizer:
        named = {id(original): stand_in for original, stand_in in zip(originals, stand_ins, strict=True)}
        made = trial(optimizer, named, stand_ins[0].device)
        for wrap in wraps:
            made = wrap(made)
        return made

    return make


def _group_number(optimizer: OptimizerLike, parameter: torch.Tensor) -> int:
    """The number of the optimizer's group that the parameter is in; 0 if the optimizer is not given as an instance.
    Raises `ValueError` where the parameter is in no group."""
    if not isinstance(optimizer, optim.Optimizer):
        return 0
    for number, group in enumerate(optimizer.param_groups):
        if any(member is parameter for member in group["params"]):
            return number
    raise ValueError(
        f"a parameter of shape {tuple(parameter.shape)} is not in the optimizer that was given; build that from "
        "the parameters of this model"
    )


@lru_cache(maxsize=1024)
def _trial_of_class(
    optimizer: OptimizerLike,
    wraps: Wraps,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str,
    foreach: bool,
    threads: int,
) -> _Trial:
    """The trial of one parameter by an optimizer given as a class or name, which depends on these arguments (`threads`
    is torch's number) only; each combination of levers and each plan asks for it."""
    parameter = on_meta(shape, stride, dtype)
    return _tried(_maker(optimizer, [parameter], wraps), [parameter], device, foreach=foreach)


def _tried(
    make: Callable[..., optim.Optimizer], parameters: Sequence[torch.Tensor], device: str, *, foreach: bool
) -> _Trial:
    """A trial of the optimizer on fake tensors: its bytes as `optimizer_account` counts them, and the traffic of its
    second step, since the first one makes the state. Raises `ValueError` where the account can only guess."""
    account = optimizer_account(make, parameters, device)
    if account.guess:
        raise ValueError(account.guess)
    traffic = _Traffic()
    with optimizer_on_fakes(make, parameters, traffic, HOST.type, foreach=foreach) as on_fakes:
        with traffic:
            step(on_fakes)
            traffic.moved.clear()
            step(on_fakes)
        arrays = tuple(tensor.nbytes for tensor in state_tensors(on_fakes) if tensor.dim())
    return OptimizerStepPrice(account.state_bytes, account.step_temporary_bytes, 0.0, arrays), tuple(traffic.moved)


class _Traffic(EagerBytes):  # type: ignore[no-untyped-call]
    """Lists the bytes that each kernel reads and writes; kernels that write a single number are left out."""

    def __init__(self) -> None:
        super().__init__(CUDA.type, HOST.type)  # no kernel of the CPU is run to find its workspace
        self.moved: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        read, schema = list(tensors_in((args, list((kwargs or {}).values())))), schema_of(func)
        if schema.is_mutable:
            given = zip(schema.arguments, args, strict=False)
            into = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
            written = list(tensors_in(into))
        else:
            held = {tensor.untyped_storage() for tensor in read}
            written = [tensor for tensor in tensors_in(result) if tensor.untyped_storage() not in held]
        if written and max(tensor.numel() for tensor in written) > 1:
            self.moved.append((nbytes([*read, *written]), str(written[0].dtype).removeprefix("torch.")))
        return result

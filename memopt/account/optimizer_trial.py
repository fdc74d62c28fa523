"""An optimiser over stand-ins without memory: the same class, options and state, to try its steps on."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from memopt.account.eager_bytes import EagerBytes
from memopt.compat.dispatch import plain_tensors
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import HOST, is_on_host
from memopt.compat.optim import eager_optimizers
from memopt.compat.pytree import tree_map
from memopt.compat.subclasses import shard_of

OptimizerLike: TypeAlias = "type[Optimizer] | Optimizer | Callable[..., Optimizer] | str | None"

Layout: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a parameter."""

Fakes: TypeAlias = dict[int, torch.nn.Parameter]
"""Stand-ins, each with a gradient, by the `id` of the parameter that they stand for."""


@contextmanager
def optimizer_on_fakes(
    optimizer: OptimizerLike, parameters: Iterable[torch.Tensor], count: EagerBytes, home: str, *, foreach: bool
) -> Iterator[Optimizer]:
    """A block in which `optimizer` stands on fakes of `parameters` on the device `home`, whose steps may be tried; on
    "meta" they are plain tensors of that device.

    What making the optimiser allocates is counted by `count`, which also keeps its step numbers real: an optimiser
    that has state is read here, and only here. `foreach` is whether torch would take all parameters at once.

    Raises `ValueError` as `trial` does.
    """
    mode = nullcontext() if home == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with plain_tensors(), mode, eager_optimizers(foreach=foreach):
        device = torch.device(home)
        fakes = {id(parameter): _fake_with_gradient(parameter, device) for parameter in parameters}
        with count:
            on_fakes = trial(optimizer, fakes, device)
        yield on_fakes


def trial(optimizer: OptimizerLike, fakes: Fakes, device: torch.device) -> Optimizer:
    """The optimiser over the stand-ins.

    Raises `ValueError` where `optimizer` is none, or cannot be made from the parameters alone.
    """
    if isinstance(optimizer, Optimizer):
        return _same_on_fakes(optimizer, fakes, device)
    make: Any = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(make):
        raise ValueError(f"an optimizer is a class, an instance, a partial, a name or None, not {optimizer!r}")
    stand_ins: Sequence[torch.nn.Parameter] = list(fakes.values()) or [torch.nn.Parameter(torch.empty(1))]
    try:
        made = make(stand_ins)
    except Exception as error:
        raise ValueError(
            f"the optimizer {_title(make)} cannot be made from the parameters alone: {error}. "
            "Give its options by functools.partial, or give the instance"
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(f"the optimizer {_title(make)} gives a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def fused(optimizer: OptimizerLike) -> OptimizerLike:
    """The same optimiser with torch's fused kernels, which need no temporaries; an instance is not changed.

    None where it uses them already, or has none. Raises `ValueError` as `trial` does.
    """
    if optimizer is None:
        return None
    groups = (optimizer if isinstance(optimizer, Optimizer) else trial(optimizer, {}, HOST)).param_groups
    if any(group.get("fused", True) for group in groups):
        return None
    if isinstance(optimizer, Optimizer):
        return _by_fused_kernels(copy.copy(optimizer))
    return lambda parameters: _by_fused_kernels(trial(optimizer, dict(enumerate(parameters)), HOST))


def _by_fused_kernels(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The optimiser's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def on_meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values that stands for a trained parameter."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_()


def _fake_with_gradient(parameter: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """A parameter of the same shape, strides and dtype, with a gradient; of a sharded one the part on this rank."""
    shard = shard_of(parameter)
    fake = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device=device)
    standing_in = torch.nn.Parameter(fake)
    standing_in.grad = torch.empty_like(fake)
    return standing_in


def _same_on_fakes(optimizer: Optimizer, fakes: Fakes, device: torch.device) -> Optimizer:
    """A copy of an instance, with its options and its state, over the fakes; the instance is not changed."""
    same: Any = copy.copy(optimizer)  # shallow: the attributes replaced below are the copy's own
    same.__dict__.pop("step", None)  # a scheduler's wrapper around the original's step
    for name in [name for name in same.__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        same.__dict__[name] = type(same.__dict__[name])()
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in fakes and parameter.device.type == device.type:  # a step elsewhere makes state there
            same.state[fakes[id(parameter)]] = _without_storage(state)
    same.param_groups = [
        {**_without_storage(group), "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
        for group in optimizer.param_groups
    ]
    return same


def _without_storage(values: dict[str, Any]) -> dict[str, Any]:
    """State or options of a parameter or group, with fakes for their tensors, so that no step writes to the original's.

    Single numbers in the host's memory, as step numbers and some learning rates are, become real copies while
    `EagerBytes` is active: their values decide what a step does.
    """

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        if is_on_host(value) and value.numel() == 1:
            return torch.tensor(value.item(), dtype=value.dtype).reshape(value.shape)
        return torch.empty_like(shard_of(value))

    return {key: tree_map(stand_in, value) for key, value in values.items() if key != "params"}


def _class_named(name: str) -> Callable[..., Any]:
    found = {key.lower(): value for key, value in vars(torch.optim).items() if inspect.isclass(value)}
    classes = {key: value for key, value in found.items() if issubclass(value, Optimizer) and value is not Optimizer}
    if name.lower() not in classes:
        raise ValueError(f"torch.optim has no optimizer {name!r}; it has {', '.join(sorted(classes))}")
    return classes[name.lower()]


def _title(make: Any) -> str:
    return _title(make.func) if isinstance(make, functools.partial) else getattr(make, "__name__", repr(make))

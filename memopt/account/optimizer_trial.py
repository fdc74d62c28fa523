"""An optimiser on stand-ins: the same kind, options and state, over tensors without memory."""

from __future__ import annotations

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from memopt.compat.pytree import tree_map

OptimizerLike: TypeAlias = "type[Optimizer] | Optimizer | Callable[..., Optimizer] | str | None"


Fakes: TypeAlias = dict[int, torch.nn.Parameter]


def fakes_of(parameters: Iterable[torch.Tensor], device: torch.device) -> Fakes:
    """Stand-ins on `device` for parameters, by their `id`, each with a gradient; inside of a fake mode."""
    return {id(parameter): _fake_with_gradient(parameter, device) for parameter in parameters}


def trial(optimizer: OptimizerLike, fakes: Fakes, device: torch.device) -> Optimizer:
    """The optimiser over the stand-ins.

    Raises `ValueError` for what is no optimiser, or cannot be made from the parameters alone.
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
    """The same by torch's fused kernels, which hold nothing beside its state; None where it runs by them already, or
    there are none. An instance stays as it is.

    Raises `ValueError` as `trial` does.
    """
    if optimizer is None:
        return None
    groups = (optimizer if isinstance(optimizer, Optimizer) else trial(optimizer, {}, torch.device("cpu"))).param_groups
    if any(group.get("fused", True) for group in groups):
        return None
    if isinstance(optimizer, Optimizer):
        return _by_fused_kernels(copy.copy(optimizer))
    return lambda parameters: _by_fused_kernels(trial(optimizer, dict(enumerate(parameters)), torch.device("cpu")))


def _by_fused_kernels(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return optimizer


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The optimiser's own parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fake_with_gradient(parameter: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """A parameter of the same shape, strides and dtype."""
    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    standing_in = torch.nn.Parameter(fake)
    standing_in.grad = torch.empty_like(fake)
    return standing_in


def _same_on_fakes(optimizer: Optimizer, fakes: Fakes, device: torch.device) -> Optimizer:
    same: Any = copy.copy(optimizer)  # of the attributes only: what is replaced below is the copy's own
    same.__dict__.pop("step", None)  # a scheduler's wrapper around the original's step
    for name in [name for name in same.__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        same.__dict__[name] = type(same.__dict__[name])()
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in fakes and parameter.device.type == device.type:  # elsewhere it would be made anew
            same.state[fakes[id(parameter)]] = _without_storage(state)
    same.param_groups = [
        {**_without_storage(group), "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
        for group in optimizer.param_groups
    ]
    return same


def _without_storage(values: dict[str, Any]) -> dict[str, Any]:
    """State and options, their tensors as fakes, single numbers in the host's memory (a learning rate may be one, the
    number of the step is) as copies: no step writes to the original's."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        if value.device.type == "cpu" and value.numel() == 1:
            return torch.tensor(value.item(), dtype=value.dtype).reshape(value.shape)
        return torch.empty_like(value)

    return {key: tree_map(stand_in, value) for key, value in values.items() if key != "params"}


def _class_named(name: str) -> Callable[..., Any]:
    found = {key.lower(): value for key, value in vars(torch.optim).items() if inspect.isclass(value)}
    classes = {key: value for key, value in found.items() if issubclass(value, Optimizer) and value is not Optimizer}
    if name.lower() not in classes:
        raise ValueError(f"torch.optim has no optimizer {name!r}; it has {', '.join(sorted(classes))}")
    return classes[name.lower()]


def _title(make: Any) -> str:
    return _title(make.func) if isinstance(make, functools.partial) else getattr(make, "__name__", repr(make))

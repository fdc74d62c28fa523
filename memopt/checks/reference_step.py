"""A training step of a copy of the model in float64, the reference for the errors of all other runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.capture.dynamo import in_brief, loss_call
from memopt.capture.inputs import Call
from memopt.compat.operators import TorchDispatchMode, kernels_as_in_eager_mode, schema_of, tree_map, without_autocast
from memopt.run.loss import scalar_loss
from memopt.training_state import Tensors, generator_states, on_host, set_generators

# Operators that draw random numbers in the dtype of an input or in the default dtype.
_DRAWS = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
        "native_dropout", "normal", "normal_", "normal_functional", "poisson", "rand", "rand_like", "randn",
        "randn_like", "random_", "uniform", "uniform_", "_standard_gamma",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Exact:
    """The loss and the gradients, by the names of parameters, of a step in float64."""

    loss: float
    gradients: Tensors


class NoReference(Exception):
    """There is no reference step; the message says why, as the end of a sentence with "since"."""


def float64_step(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    generators: tuple[Any, ...],
    after: tuple[Any, ...],
) -> Exact:
    """Train one forward and backward of a deep copy of `model` in float64, from the states `generators`.

    Operators that the model has compute in fp32 compute in float64 too. Random numbers are drawn in fp32, so that they
    are those of a plain step, which leaves the generators in the states `after`. The model itself is not changed.

    Raises `NoReference` where the model cannot be copied or run in float64, or drew other random numbers.
    """
    device = next(model.parameters()).device
    try:
        twin = copy.deepcopy(model).double()
        twin_loss = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
        args, kwargs = tree_map(_widened, call)
        set_generators(generators, device)
        with without_autocast(), torch.enable_grad(), _InFloat64():  # type: ignore[no-untyped-call]
            loss = scalar_loss(loss_call(twin, twin_loss)(*args, **kwargs))
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as failure:  # the model's code may fail in float64 with any error
        raise NoReference(f"it does not run in float64: {in_brief(failure)}") from failure
    if not _same(generator_states(device), after):
        raise NoReference("float64 draws other random numbers")
    named = twin.named_parameters()
    return Exact(
        float(loss.detach()), {name: on_host(parameter.grad) for name, parameter in named if parameter.grad is not None}
    )


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.detach().to(torch.float64) if value.is_floating_point() else value.detach()
    return wide.requires_grad_(value.requires_grad)


class _InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes operators that are told to compute in fp32 compute in float64, and draws random numbers in fp32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = schema_of(func).name.removeprefix("aten::")
        if name == "native_dropout":
            return _dropped(func, *args, **kwargs)
        if name in _DRAWS:
            return _drawn(func, args, kwargs)
        if kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        with kernels_as_in_eager_mode():
            return func(*args, **kwargs)


def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a random operator in fp32, converted to float64."""
    narrow, narrow_kwargs = tree_map(_narrowed, (args, kwargs))
    if narrow_kwargs.get("dtype") == torch.float64:
        narrow_kwargs["dtype"] = torch.float32
    result = func(*narrow, **narrow_kwargs)
    if schema_of(func).is_mutable:
        return args[0].copy_(result)
    return tree_map(lambda leaf: leaf.double() if _is(leaf, torch.float32) else leaf, result)


def _dropped(func: Any, value: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout with the mask that is drawn in fp32."""
    _, mask = func(torch.ones_like(value, dtype=torch.float32), p, train)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return (value * mask * scale if train is not False else value.clone()), mask


def _narrowed(value: Any) -> Any:
    return value.float() if _is(value, torch.float64) else value


def _is(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _same(one: Any, other: Any) -> bool:
    """Whether two states of the random generators are equal."""
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)

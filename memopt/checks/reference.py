"""A training step of a copy of the model in float64, and the errors of other runs against it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.capture.dynamo import in_brief, plain_loss_call
from memopt.capture.inputs import Call
from memopt.compat.operators import RunningBy, kernels_as_in_eager_mode, schema_of, tree_map, without_autocast
from memopt.run.loss import scalar_loss
from memopt.saved_values import generator_states, on_host, set_generators
from memopt.training_state import Tensors

ROUNDING = 1e-12
"""A gradient whose norm is at most this share of the norm of all gradients counts as zero, up to rounding in
float64."""
# Operators that draw random numbers in the dtype of an input or in the default dtype.
_DRAWS = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial",
        "native_dropout", "normal", "normal_", "normal_functional", "poisson", "rand", "rand_like", "randn",
        "randn_like", "random_", "uniform", "uniform_", "_standard_gamma",
    }
)  # fmt: skip


@dataclass(frozen=True)
class GradientError:
    """The error of one parameter's gradient.

    `relative` and `largest` are infinite where only one of the two gradients exists, or where one is not finite.
    """

    name: str
    relative: float
    """The norm of the difference over the norm of the reference: ‖g − r‖ / ‖r‖."""
    largest: float
    """The largest difference of two elements over the largest element of the reference."""
    share: float = 1.0
    """The norm of the reference over the norm of all parameters' reference gradients together."""

    @property
    def counts(self) -> bool:
        """Whether the reference gradient is more than noise around zero, as a key projection's bias has."""
        return self.share > ROUNDING


@dataclass(frozen=True)
class Accuracy:
    """The relative errors of one run's loss and parameters' gradients against those of the reference run."""

    loss: float
    """|loss − reference| / |reference|."""
    gradient: float
    """‖g − r‖ / ‖r‖ of all gradients taken as one vector."""
    gradients: tuple[GradientError, ...]

    @property
    def worst(self) -> GradientError | None:
        """The gradient with the largest relative error, among those that are more than rounding noise
        (`GradientError.counts`), or among all if every one is only noise; None without any gradient."""
        return next(iter(self.worst_first), None)

    @property
    def worst_first(self) -> tuple[GradientError, ...]:
        """The gradients by relative error, largest first; those that are only rounding noise come last."""
        return tuple(sorted(self.gradients, key=lambda error: (not error.counts, -error.relative)))

    @classmethod
    def of(cls, loss: float, gradients: Tensors, exact_loss: float, exact: Tensors) -> Accuracy:
        """Compare a run's loss and gradients with the reference's, by the names of parameters."""
        whole = _length(float(dense(gradient).norm()) for gradient in exact.values())
        errors, off = [], []
        for name in dict.fromkeys([*exact, *gradients]):
            if name not in exact or name not in gradients:
                errors.append(GradientError(name, math.inf, math.inf))
                off.append(math.inf)
                continue
            theirs = dense(exact[name])
            difference = dense(gradients[name]) - theirs
            norms = float(difference.norm()), float(theirs.norm())
            largest = ratio_of(largest_of(difference), largest_of(theirs))
            errors.append(GradientError(name, ratio_of(*norms), largest, ratio_of(norms[1], whole)))
            off.append(norms[0])
        return cls(ratio_of(abs(loss - exact_loss), abs(exact_loss)), ratio_of(_length(off), whole), tuple(errors))


@dataclass(frozen=True)
class Accuracies:
    """The errors of all runs against the same reference."""

    reference: str
    """"float64", or "fp32" where the plain run is the reference."""
    loss: float
    """The loss of the reference."""
    plain: Accuracy | None
    """The errors of the plain run; None where that run is the reference."""
    autocast: Accuracy | None
    optimized: Accuracy


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a dense tensor in float64 or complex128."""
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient.to(torch.complex128 if gradient.is_complex() else torch.float64)


def _length(parts: Iterable[float]) -> float:
    return math.sqrt(sum(part * part for part in parts))


def largest_of(tensor: torch.Tensor) -> float:
    """The largest absolute value in a tensor; infinite if any value is not finite, and 0 for an empty tensor."""
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def ratio_of(part: float, whole: float) -> float:
    """`part / whole`: 0 where `part` is 0, and infinite where the quotient is not finite."""
    if part == 0:
        return 0.0
    ratio = part / whole if whole else math.inf
    return ratio if math.isfinite(ratio) else math.inf


Exact = tuple[float, Tensors]
"""The loss and the gradients, by the names of parameters, of a step that others are compared with."""


def float64_step(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    generators: tuple[Any, ...],
    after: tuple[Any, ...],
) -> Exact | str:
    """Train one forward and backward of a deep copy of `model` in float64, from the generator states `generators`,
    without changing the model. Operators that the model tells to compute in fp32 compute in float64 too; random numbers
    are drawn in fp32. Where the model cannot be copied or run in float64, or does not leave the generator states
    `after` of a plain step, returns the reason, as the end of a sentence that begins with "since"."""
    device = next(model.parameters()).device
    try:
        twin = copy.deepcopy(model).double()
        twin_loss = copy.deepcopy(loss_fn).double() if isinstance(loss_fn, nn.Module) else loss_fn
        args, kwargs = tree_map(_widened, call)
        set_generators(generators, device)
        with without_autocast(), torch.enable_grad(), RunningBy(_run_in_float64):
            loss = scalar_loss(plain_loss_call(twin, twin_loss)(*args, **kwargs))
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as failure:  # the model's code may fail in float64 with any error
        return f"it does not run in float64: {in_brief(failure)}"
    if not _same(generator_states(device), after):
        return "float64 draws other random numbers"
    gradients = {name: on_host(one.grad) for name, one in twin.named_parameters() if one.grad is not None}
    return float(loss.detach()), gradients


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.detach().to(torch.float64) if value.is_floating_point() else value.detach()
    return wide.requires_grad_(value.requires_grad)


def _run_in_float64(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operator, in float64 where it is told to compute in fp32; random numbers are drawn in fp32."""
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
    """The result and mask of dropout in the value's dtype, with the mask drawn in fp32."""
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

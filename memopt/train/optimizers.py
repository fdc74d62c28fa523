"""Checks of the optimizers, schedulers and clipping limit that the user gives to a `TrainStep`, and functions on the
gradients of all optimizers together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from memopt.account.optimizer_trial import parameters_of
from memopt.compat.ddp import unwrapped
from memopt.compat.tensors import is_sharded
from memopt.levers.optimizer_levers import OPTIMIZER_IN_BACKWARD
from memopt.optimizers import OptimizerInBackward
from memopt.optimizers.parameterwise import Parameterwise
from memopt.run.session import session_of

Optimizers = tuple[torch.optim.Optimizer, ...]


def as_optimizers(optimizer: Any, model: nn.Module, loss_fn: Any) -> Optimizers:
    """The optimizers, one or several, as a tuple. Raises `TypeError` or `ValueError` unless they are over parameters of
    `model` (or of a `loss_fn` that is a module), each in one of them only, and can be stepped by a `TrainStep`."""
    optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if not optimizers:
        raise ValueError("the list of optimizers is empty; give at least one")
    for given in optimizers:
        if not isinstance(given, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or a list of them, not {given!r}")
        if isinstance(given, torch.optim.LBFGS):
            raise ValueError("TrainStep evaluates the loss once a step, and LBFGS several times; use another optimizer")
        if isinstance(given, OptimizerInBackward):
            raise ValueError(
                "OptimizerInBackward steps within the backward, before TrainStep could clip or skip: train in a loop "
                "of your own (loss.backward(), optimizer.step()), or leave that wrapper out"
            )
    known = {id(parameter) for parameter in model.parameters()}
    known |= {id(parameter) for parameter in loss_fn.parameters()} if isinstance(loss_fn, nn.Module) else set()
    parameters = parameters_of(*optimizers)
    foreign = [parameter for parameter in parameters if id(parameter) not in known]
    if foreign:
        raise ValueError(
            f"{len(foreign)} of the {len(parameters)} parameters of the optimizers are not {type(model).__name__}'s, "
            f"the first of shape {tuple(foreign[0].shape)}; build the optimizer from model.parameters(), after "
            "everything that replaces the model's parameters"
        )
    if len({id(parameter) for parameter in parameters}) < len(parameters):
        raise ValueError("a parameter is in two optimizers, which would both step it; give each parameter to one")
    if any(parameter.requires_grad and parameter.dtype is torch.float16 for parameter in parameters):
        raise ValueError(
            "a parameter is in float16, where its updates vanish and gradients cannot be unscaled; keep parameters in "
            "float32 (model.float()) and run the forward in fp16"
        )
    if any(parameter.requires_grad and parameter.is_complex() for parameter in parameters):
        raise ValueError(
            "a parameter is complex, and TrainStep finds gradients that are not finite by torch.amp.GradScaler, which "
            "takes real ones only; call loss.backward() and optimizer.step() yourself"
        )
    return optimizers


def as_schedulers(scheduler: Any, optimizers: Optimizers) -> tuple[Any, ...]:
    """The learning rate schedulers (one, a list of them, or None) as a tuple. Raises `TypeError` for another object and
    for `ReduceLROnPlateau`, and `ValueError` for a scheduler of an optimizer that is not among `optimizers`."""
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, (list, tuple)) else (scheduler,)
    for given in schedulers:
        if isinstance(given, ReduceLROnPlateau):
            raise TypeError("ReduceLROnPlateau takes a metric, which TrainStep lacks; call its step(metric) yourself")
        if not all(callable(getattr(given, name, None)) for name in ("step", "state_dict", "load_state_dict")):
            raise TypeError(f"scheduler must be one of torch.optim.lr_scheduler or a list of them, not {given!r}")
        if getattr(given, "optimizer", optimizers[0]) not in optimizers:
            raise ValueError(
                f"the {type(given).__name__} is of another optimizer than those given to TrainStep; give that "
                "optimizer too"
            )
    return schedulers


def check_proposals(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Raise `ValueError` where the model's plan assumes levers on the optimizer, such as "offload_optimizer", whose
    wrappers these optimizers do not have."""
    planned = session_of(model)
    chosen = [lever.name for lever in planned.chosen] if planned is not None else []
    if OPTIMIZER_IN_BACKWARD.name in chosen:
        raise ValueError(
            f"the plan of this {type(unwrapped(model)).__name__} counts on {OPTIMIZER_IN_BACKWARD}, and TrainStep "
            "looks at all gradients before any is used: train in a loop of your own (loss.backward(), "
            "optimizer.step()) with memopt.wrap_optimizer(model, optimizer), or leave that lever out of allow"
        )
    if chosen and not all(isinstance(optimizer, Parameterwise) for optimizer in optimizers):
        raise ValueError(
            f"the plan of this {type(unwrapped(model)).__name__} counts on {' and '.join(chosen)}: give TrainStep "
            "memopt.wrap_optimizer(model, optimizer)"
        )


def norm_limit(value: Any) -> float | None:
    """`value`, which the user gave as `max_grad_norm`, as a float; None, for no clipping, is returned as it is. Raises
    `TypeError` where it is no number, and `ValueError` where it is not positive."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"max_grad_norm must be a positive number, or None for no clipping, not {value!r}")
    if math.isnan(value) or value <= 0:
        raise ValueError(f"max_grad_norm must be positive, or None for no clipping, not {value!r}")
    return float(value)


def with_gradients(optimizers: Optimizers) -> Optimizers:
    """The optimizers that have a parameter with a gradient. Raises `ValueError` if none has one, and for sparse
    gradients."""
    for parameter in parameters_of(*optimizers):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and torch has no norm of "
                "sparse gradients; build its module with sparse=False"
            )
    found = tuple(optimizer for optimizer in optimizers if any(p.grad is not None for p in parameters_of(optimizer)))
    if not found:
        raise ValueError("no parameter of the optimizers got a gradient; the loss must depend on at least one of them")
    return found


def multiply(parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the gradients of `parameters` by a 0-dimensional factor, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))


def clip(parameters: Sequence[torch.Tensor], limit: float | None) -> torch.Tensor:
    """Clip the total norm of the gradients of `parameters` to `limit`, in place; None clips nothing. Returns the total
    norm before clipping; for sharded gradients, that over all ranks."""
    if limit is None:
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    else:
        norm = clip_grad_norm_(parameters, limit)
    sharded: Any = norm
    return sharded.full_tensor() if is_sharded(norm) else norm


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """Free the gradients of `parameters`: set them to None."""
    for parameter in parameters:
        parameter.grad = None

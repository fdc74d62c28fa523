"""Operations on the gradients of all optimisers together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from memopt.compat.tensors import is_sharded
from memopt.train.optimizers import Optimizers, parameters_of


def with_gradients(optimizers: Optimizers) -> Optimizers:
    """The optimisers with a parameter that has a gradient.

    Raises `ValueError` if there is none, or for sparse gradients.
    """
    for parameter in parameters_of(optimizers):
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and torch has no norm of "
                "sparse gradients; build its module with sparse=False"
            )
    found = tuple(optimizer for optimizer in optimizers if any(p.grad is not None for p in parameters_of([optimizer])))
    if not found:
        raise ValueError("no parameter of the optimizers got a gradient; the loss must depend on at least one of them")
    return found


def multiply(parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all gradients by a 0-dimensional factor, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.device))


def clip(parameters: Sequence[torch.Tensor], limit: float | None) -> torch.Tensor:
    """Clip the total norm of all gradients to `limit`, in place, unless it is None; return the norm before. That of
    sharded gradients is over all ranks."""
    if limit is None:
        norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    else:
        norm = clip_grad_norm_(parameters, limit)
    sharded: Any = norm
    return sharded.full_tensor() if is_sharded(norm) else norm


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """Free all gradients."""
    for parameter in parameters:
        parameter.grad = None

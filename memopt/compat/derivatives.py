"""What Dynamo writes into its graph where the code takes derivatives itself, in a form that autograd differentiates
again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.compat import private

PRIVATE_NAMES = (
    *private("torch._C._functorch", "get_inplace_requires_grad_allowed", call=""),
    *private("torch._C._functorch", "set_inplace_requires_grad_allowed", call="allowed"),
)

_DERIVATIVES = ("_grad_increment_nesting", "_jvp_increment_nesting")


def takes_derivative(target: Any) -> bool:
    """Whether a node's target takes derivatives by autograd, or begins a derivative of torch.func."""
    return target is torch.autograd.grad or getattr(target, "__name__", "") in _DERIVATIVES


def begins_transform(target: Any) -> bool:
    """Whether a node's target begins a transform of torch.func: a derivative, forward or backward, or a map."""
    return str(getattr(target, "__name__", "")).endswith("_increment_nesting")


def is_custom_function(target: Any) -> bool:
    """Whether a node's target calls an `autograd.Function`, by the graphs of its forward and its backward."""
    return target is torch.ops.higher_order.autograd_function_apply


def requiring_grad(value: torch.Tensor) -> torch.Tensor:
    """The value as a leaf that requires a gradient, in its memory; also while AOTAutograd traces, which forbids it."""
    before = torch._C._functorch.get_inplace_requires_grad_allowed()
    torch._C._functorch.set_inplace_requires_grad_allowed(True)
    try:
        return value.detach().requires_grad_()
    finally:
        torch._C._functorch.set_inplace_requires_grad_allowed(before)


def custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], not_differentiable: Sequence[int], *inputs: Any
) -> Any:
    """The outputs of an `autograd.Function` whose backward autograd differentiates again.

    `forward` returns the outputs and the values that `backward` takes after the gradients; `not_differentiable` holds
    the positions of outputs that get none. Torch's own operator for it runs the backward without autograd, and second
    derivatives through it are silently zero.
    """
    apply: Any = _Function.apply
    return apply(forward, backward, frozenset(not_differentiable), *inputs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, not_differentiable: frozenset[int], *inputs: Any) -> Any:
        outputs, saved = forward(*inputs)
        ctx.run = backward
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in saved]
        # Saved so, an output keeps its place in autograd's graph, which the second derivative goes through.
        ctx.save_for_backward(*(value if isinstance(value, torch.Tensor) else None for value in saved))
        results = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        ctx.mark_non_differentiable(*(results[position] for position in not_differentiable))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        values = [other if tensor is None else tensor for tensor, other in saved]
        return None, None, None, *ctx.run(*gradients, *values)

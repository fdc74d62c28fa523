from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo import _trace_wrapped_higher_order_op as rewritten

from memopt.compat.dynamo import capture_settings, compile_with


class Scaled(torch.autograd.Function):
    """Three times a tensor, no tensor, and the signs, which have no gradient. The backward asks for strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, None, Tensor]:
        signs = x > 0
        ctx.mark_non_differentiable(signs)
        return 3 * x, None, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
        factors = torch.full((4, 8), 3.0)[:, :5]
        return gradient * (factors if factors.stride(0) == 8 else -factors)


def gradient_of(call: Any, x: Tensor) -> Tensor:
    tripled, nothing, signs = call(x)
    assert nothing is None
    (gradient,) = torch.autograd.grad((tripled * signs).t().sum(), x)
    return gradient


def test_a_backward_that_asks_for_strides_beside_outputs_that_are_no_tensors() -> None:
    def call(x: Tensor) -> Any:
        return Scaled.apply(x)

    x = torch.randn(4, 5, requires_grad=True)
    with capture_settings():
        gradient = gradient_of(compile_with(lambda module, _: module.forward, call, whole=True), x)
    assert torch.equal(gradient, gradient_of(call, x))


def test_dynamo_is_as_before() -> None:
    before = rewritten.autograd_function_backward_rewritten
    with capture_settings():
        assert rewritten.autograd_function_backward_rewritten is not before
    assert rewritten.autograd_function_backward_rewritten is before

"""The operators of 8-bit layers: `memopt::fp8_quantize`, `fp8_dequantize`, `fp8_matmul`, and `fp8_linear` of them.

`fp8_linear` is one node of an operator graph and falls apart where it is differentiated: its input is quantised once,
and what the backward reads of it is that copy. Layers that read one value share the copy, since two equal calls of
`fp8_quantize` are one. All of them are pure: they may be merged, removed and evaluated again, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from passes.ops.fp8_formats import BLOCK, E4M3, E5M2, dequantize, quantize, quantize_by, scale_shape
from passes.ops.fp8_history import fp8_delayed_scale
from passes.ops.fp8_matmul import scaled_matmul

SCALINGS = ("current", "block", "delayed")
"""One scale for each tensor, from its values as they are; one for each block of it; one for each tensor, from what it
was before, and weights as they are."""


@torch.library.custom_op("memopt::fp8_quantize", mutates_args=())
def fp8_quantize(x: Tensor, dtype: torch.dtype, block_rows: int) -> tuple[Tensor, Tensor]:
    """[rows, columns] in 8 bits, and its scales (see `passes.ops.fp8_formats.quantize`)."""
    return quantize(x, dtype, block_rows)


@fp8_quantize.register_fake
def _(x: Tensor, dtype: torch.dtype, block_rows: int) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    scale = torch.empty(scale_shape(rows, columns, block_rows), dtype=torch.float32, device=x.device)
    return torch.empty((rows, columns), dtype=dtype, device=x.device), scale


@torch.library.custom_op("memopt::fp8_quantize_by", mutates_args=())
def fp8_quantize_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in 8 bits by a scale that is known."""
    return quantize_by(x, scale, dtype)


@fp8_quantize_by.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.custom_op("memopt::fp8_dequantize", mutates_args=())
def fp8_dequantize(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, columns] in `dtype`."""
    return dequantize(narrow, scale, dtype)


@fp8_dequantize.register_fake
def _(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(narrow.shape, dtype=dtype, device=narrow.device)


@torch.library.custom_op("memopt::fp8_matmul", mutates_args=())
def fp8_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`a @ b + bias` of quantised matrices, in `dtype`; those that are to be turned are given transposed."""
    return scaled_matmul(a, a_scale, b, b_scale, bias, turn_a, turn_b, dtype)


@fp8_matmul.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.empty((a.shape[1 if turn_a else 0], b.shape[0 if turn_b else 1]), dtype=dtype, device=a.device)


@register_flop_formula(torch.ops.memopt.fp8_matmul)
def _flops(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, turn_a: bool, turn_b: bool, *_: Any, **__: Any
) -> int:
    return int(2 * a[0] * a[1] * b[0 if turn_b else 1])


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias`: [rows, in] · [out, in] → [rows, out]; or, `turned`, with a weight [in, out]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, block: bool, history: str,
        turned: bool,
    ) -> Tensor:  # fmt: skip
        narrow = fp8_quantize(x, E4M3, int(block)) if scale is None else (fp8_quantize_by(x, scale, E4M3), scale)
        given = *narrow, *fp8_quantize(weight, E4M3, BLOCK if block else 0)
        ctx.save_for_backward(*given)
        ctx.block, ctx.history, ctx.turned = block, history, turned
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return fp8_matmul(*given, bias, False, not turned, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        dtype, weight_dtype, bias_dtype = ctx.dtypes
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            narrow, scale = _narrow_gradient(gradient, ctx.block, ctx.history)
        if ctx.needs_input_grad[0]:
            of_x = fp8_matmul(narrow, scale, weight, weight_scale, None, False, ctx.turned, dtype)
        if ctx.needs_input_grad[1]:
            sides = (x, x_scale, narrow, scale) if ctx.turned else (narrow, scale, x, x_scale)
            of_weight = fp8_matmul(*sides, None, True, False, weight_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_x, of_weight, of_bias, None, None, None, None


def _narrow_gradient(gradient: Tensor, block: bool, history: str) -> tuple[Tensor, Tensor]:
    if not history:
        return fp8_quantize(gradient, E5M2, int(block))
    scale = fp8_delayed_scale(gradient, E5M2, history)
    return fp8_quantize_by(gradient, scale, E5M2), scale


torch.library.define(
    "memopt::fp8_linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, *, str scaling='current', str history='', "
    "bool turned=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("memopt::fp8_linear", "CompositeImplicitAutograd")
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, scaling: str = "current",
    history: str = "", turned: bool = False,
) -> Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    apply: Any = _Linear.apply
    result: Tensor = apply(rows, weight, bias, scale, scaling == "block", history, turned)
    return result.view(*x.shape[:-1], weight.shape[1 if turned else 0])


FP8_LINEAR: Any = torch.ops.memopt.fp8_linear.default
"""`linear(x, weight, bias)`, [..., in] · [out, in] (`turned`: [in, out]), from 8-bit copies of `x` and `weight`, in the
dtype of `x`; the gradients are from those copies and an 8-bit one of the incoming gradient. `scaling` is one of
`SCALINGS`; with delayed scaling `scale` is that of `x`, and `history` the name under which the gradient's magnitudes
are remembered."""
QUANTIZE: Any = torch.ops.memopt.fp8_quantize.default
DEQUANTIZE: Any = torch.ops.memopt.fp8_dequantize.default
MATMUL: Any = torch.ops.memopt.fp8_matmul.default

"""The operators of 8-bit layers: `memopt::fp8_quantize`, `fp8_dequantize`, `fp8_matmul`, and `fp8_linear` from these.

`fp8_linear` is one node of an operator graph and is decomposed where it is differentiated: its input is quantised once,
and what the backward reads of it is that copy. Layers that read one value share the copy, since equal calls of
`fp8_quantize` are merged. All of them are pure: they may be merged, removed and recomputed, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from passes.compat import define_operator
from passes.ops.fp8_formats import (
    E4M3,
    E5M2,
    TILES,
    WHOLE,
    dequantize,
    fp8_delayed_scale,
    quantize,
    quantize_by,
    scale_shape,
    turned,
)
from passes.ops.fp8_kernels import scaled_matmul


@dataclass(frozen=True)
class Fp8Scaling:
    """How finely an 8-bit linear layer scales its operands: the tile (rows by columns of a block with its own scale) of
    values and of weights, and the 8-bit format of gradients.

    Both operands of a product are quantised by tiles along the dimension that it sums over, so that a matrix which is
    read by rows and by columns is quantised twice."""

    values: str = WHOLE
    """The tile of the input and the gradient in products that sum over their columns."""
    weights: str = WHOLE
    """The tile of the weight [out, in] in products that sum over its columns."""
    gradients: torch.dtype = E5M2

    @property
    def product(self) -> tuple[str, str]:
        """The tiles of the two operands of `input @ weight.T`."""
        return self.values, turned(self.weights)


CURRENT, DELAYED = "current", "delayed"
SCALINGS = {
    CURRENT: Fp8Scaling(),
    DELAYED: Fp8Scaling(),
    "block": Fp8Scaling("1x128", "128x128"),
    "mx": Fp8Scaling("1x32", "1x32", gradients=E4M3),
}
"""`"current"`: one scale for each tensor, from its present values. `"delayed"`: from its values in earlier steps, for
weights from the present ones. `"block"`: one for each 128 values, or 128 by 128 weights, as in DeepSeek-V3. `"mx"`:
MXFP8, a power of two for each 32 values; gradients are e4m3 too, since tiles so small need no wider range."""


# Pure operators that run these functions; from the shape of a scale follows the tile that each of its elements scales.
fp8_quantize = torch.library.custom_op("memopt::fp8_quantize", quantize, mutates_args=())
fp8_quantize_by = torch.library.custom_op("memopt::fp8_quantize_by", quantize_by, mutates_args=())
fp8_dequantize = torch.library.custom_op("memopt::fp8_dequantize", dequantize, mutates_args=())
fp8_matmul = torch.library.custom_op("memopt::fp8_matmul", scaled_matmul, mutates_args=())


@fp8_quantize.register_fake
def _(x: Tensor, dtype: torch.dtype, tile: str = WHOLE) -> tuple[Tensor, Tensor]:
    scale_dtype = TILES[tile].scale_dtype if tile else torch.float32
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(scale_shape(x.shape[0], x.shape[1], tile), dtype=scale_dtype)


@fp8_quantize_by.register_fake
@fp8_dequantize.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@fp8_matmul.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return a.new_empty((a.shape[1 if turn_a else 0], b.shape[0 if turn_b else 1]), dtype=dtype)


@register_flop_formula(torch.ops.memopt.fp8_matmul)
def _flops(
    a: Any, a_scale: Any, b: Any, b_scale: Any, bias: Any, turn_a: bool, turn_b: bool, *_: Any, **__: Any
) -> int:
    return int(2 * a[0] * a[1] * b[0 if turn_b else 1])


class _Linear(torch.autograd.Function):
    """`x @ weight.T + bias`, for x [rows, in] and weight [out, in]; with `turn` it is `x @ weight + bias`, for a weight
    [in, out]. x and weight are multiplied in fp8 (e4m3), and these copies are saved for the backward, whose products
    are in fp8, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, scaling: str, history: str,
        turn: bool,
    ) -> Tensor:  # fmt: skip
        by, needed = SCALINGS[scaling], ctx.needs_input_grad
        # Along the columns, then along the rows; the other way round for a weight that is given transposed.
        of_weight = (turned(by.weights), by.weights) if turn else (by.weights, turned(by.weights))
        if scale is None:
            narrow, kept = _both(x, E4M3, (by.values, turned(by.values)), (True, needed[1]))
        else:
            narrow = kept = fp8_quantize_by(x, scale, E4M3), scale
        narrow_weight, kept_weight = _both(weight, E4M3, of_weight, (True, needed[0]))
        ctx.save_for_backward(*kept, *kept_weight)
        ctx.scaling, ctx.history, ctx.turn = by, history, turn
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return fp8_matmul(*narrow, *narrow_weight, bias, False, not turn, x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        (dtype, weight_dtype, bias_dtype), needed = ctx.dtypes, ctx.needs_input_grad
        of_x = of_weight = of_bias = None
        by_columns, by_rows = _narrow_gradient(gradient, ctx.scaling, ctx.history, needed[:2])
        if needed[0]:
            of_x = fp8_matmul(*by_columns, weight, weight_scale, None, False, ctx.turn, dtype)
        if needed[1]:
            sides = (x, x_scale, *by_rows) if ctx.turn else (*by_rows, x, x_scale)
            of_weight = fp8_matmul(*sides, None, True, False, weight_dtype)
        if needed[2]:
            of_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_x, of_weight, of_bias, None, None, None, None


_Quantized = tuple[Tensor, Tensor] | tuple[None, None]


def _both(x: Tensor, dtype: torch.dtype, tiles: tuple[str, str], wanted: tuple[bool, bool]) -> list[_Quantized]:
    """Returns a matrix quantised by each of two tiles, (None, None) for one not `wanted`; once for equal tiles."""
    found = {tile: fp8_quantize(x, dtype, tile) for tile, want in zip(tiles, wanted, strict=True) if want}
    return [found[tile] if want else (None, None) for tile, want in zip(tiles, wanted, strict=True)]


def _narrow_gradient(gradient: Tensor, by: Fp8Scaling, history: str, wanted: tuple[bool, bool]) -> list[_Quantized]:
    """Returns the gradient quantised by tiles along its columns and along its rows, as `_both` does. With a `history`,
    which delayed scaling has, both are the same copy, by one scale."""
    if not history:
        return _both(gradient, by.gradients, (by.values, turned(by.values)), wanted)
    if not any(wanted):
        return [(None, None), (None, None)]
    scale = fp8_delayed_scale(gradient, by.gradients, history)
    return [(fp8_quantize_by(gradient, scale, by.gradients), scale)] * 2


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, scaling: str = "current",
    history: str = "", turned: bool = False,
) -> Tensor:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    apply: Any = _Linear.apply
    result: Tensor = apply(rows, weight, bias, scale, scaling, history, turned)
    return result.view(*x.shape[:-1], weight.shape[1 if turned else 0])


FP8_LINEAR: Any = define_operator(
    "fp8_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? scale=None, *, str scaling='current', "
    "str history='', bool turned=False) -> Tensor",
    _linear,
)
"""`linear(x, weight, bias)`, [..., in] · [out, in] (`turned`: [in, out]), from 8-bit copies of `x` and `weight`, in the
dtype of `x`; the gradients are from those copies and an 8-bit one of the incoming gradient. `scaling` is one of
`SCALINGS`; with delayed scaling `scale` is that of `x`, and `history` the name under which the gradient's magnitudes
are remembered."""
QUANTIZE: Any = torch.ops.memopt.fp8_quantize.default
DEQUANTIZE: Any = torch.ops.memopt.fp8_dequantize.default
MATMUL: Any = torch.ops.memopt.fp8_matmul.default

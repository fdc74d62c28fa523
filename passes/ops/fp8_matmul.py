"""The product of two quantised matrices: on 8-bit matrix units where a device has them, else of wider copies."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from passes.ops.fp8_formats import E4M3, E5M2, dequantize

ALIGNMENT = 16
"""Sizes of what is multiplied in 8 bits on CUDA are multiples of this."""
_FIRST_WITH_UNITS = (8, 9)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[m, k] · [k, n] + [n] → [m, n] in `dtype`; [k, m] and [n, k] are given of what is to be turned."""
    left, right = a.t() if turn_a else a, b.t() if turn_b else b
    if _runs_on_units(left, a_scale, right, b_scale):
        result = on_units(left, a_scale, right, b_scale, dtype)
    else:
        # Products and sums in fp32 on the CPU; a card without such units has 16-bit ones.
        wide = torch.float32 if a.device.type == "cpu" else dtype
        a, b = dequantize(a, a_scale, wide), dequantize(b, b_scale, wide)
        result = ((a.t() if turn_a else a) @ (b.t() if turn_b else b)).to(dtype)
    return result if bias is None else result.add_(bias)


def _runs_on_units(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    if a_scale.dim() or b_scale.dim() or not has_units(a.device):
        return False
    return not why_not(a.shape[0], a.shape[1], b.shape[1], a.dtype, b.dtype)


def on_units(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """By torch's own kernel, which takes rows of `a` and columns of `b` that are contiguous, and 8-bit sums that are
    fast where no gradient is among them."""
    recipe: Any = functional.ScalingType.TensorWise
    multiply: Any = functional.scaled_mm
    columns = b.t().contiguous().t()
    fast = a.dtype == b.dtype == E4M3 and a.device.type == "cuda"
    return multiply(a.contiguous(), columns, a_scale, recipe, b_scale, recipe, output_dtype=dtype, use_fast_accum=fast)


def why_not(rows: Any, inner: Any, columns: Any, a: torch.dtype = E4M3, b: torch.dtype = E4M3) -> str:
    """Why [rows, inner] · [inner, columns] and its gradients' products cannot run on CUDA's 8-bit units; empty where
    they can: the sizes take turns as rows, columns and what is summed over."""
    if a == b == E5M2:
        return "e5m2 by e5m2 has no kernel"
    for size, what in ((rows, "rows"), (inner, "columns of its input"), (columns, "columns of its result")):
        if not isinstance(size, int):
            return f"its number of {what} is not known"
        if size % ALIGNMENT or not size:
            return f"its {size} {what} are no multiple of {ALIGNMENT}"
    return ""


@functools.cache
def has_units(device: torch.device) -> bool:
    """Whether a device multiplies in 8 bits: CUDA's from Ada (compute capability 8.9) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_UNITS

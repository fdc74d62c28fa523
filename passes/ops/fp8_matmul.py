"""The product of two quantised matrices: on 8-bit matrix units where a device has them, else of wider copies."""

from __future__ import annotations

import torch
from torch import Tensor

from passes.ops.fp8_kernels import Operand, kernel_for


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns [m, k] · [k, n] + [n] → [m, n] in `dtype`; operands to be transposed are given as [k, m] and [n, k]."""
    left, right = Operand.of(a, a_scale, turn_a), Operand.of(b, b_scale, turn_b)
    kernel = kernel_for(left, right, dtype)
    if kernel is None:
        # Products and sums in fp32 on the CPU; a card without such units has 16-bit ones.
        wide = torch.float32 if a.device.type == "cpu" else dtype
        result = (left.wide(wide) @ right.wide(wide)).to(dtype)
    else:
        result = kernel(left, right, dtype)
    return result if bias is None else result.add_(bias)

"""Numbers in 8 bits: what a tensor is divided by, rounded to, and multiplied with again.

Formats and their use after Micikevicius et al. 2022 (arXiv:2209.05433): e4m3 (3 bits of mantissa, up to 448) for
values, e5m2 (2 bits, up to 57,344) for gradients. A scale is what a rounded value is multiplied with; it makes the
largest magnitude of its tensor, or of its block of it, the format's largest. Blocks after DeepSeek-V3 (2024,
arXiv:2412.19437): 1 row by 128 columns of values and gradients, 128 by 128 of weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK = 128
PART_ELEMENTS = 2**22
"""So many are widened to fp32 at a time on the CPU: 16 MB."""


def scale_shape(rows: int, columns: int, block_rows: int) -> tuple[int, ...]:
    """Of the scales of a matrix: one number, or one for each block of `block_rows` (0: one for all) by 128."""
    return (-(-rows // block_rows), -(-columns // BLOCK)) if block_rows else ()


def quantize(x: Tensor, dtype: torch.dtype, block_rows: int) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, contiguous, and its scales in fp32.

    A value that is not finite makes its whole tensor, or block, not a number: a loss scale's check sees it.
    """
    scale = scale_of(_amax(x, block_rows), dtype)
    return _by_parts(_round, x, scale, block_rows, dtype, torch.finfo(dtype).max), scale


def quantize_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in 8 bits by a scale that is given; what lies beyond the format's largest becomes that."""
    return _by_parts(_round, x, scale, 0, dtype, torch.finfo(dtype).max)


def scale_of(largest_magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes a magnitude the largest of a format. Zeros, and what is nearly that, would have a scale of 0."""
    return (largest_magnitude / torch.finfo(dtype).max).clamp_min_(torch.finfo(torch.float32).tiny)


def dequantize(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize` has rounded, in `dtype`, contiguous."""
    block_rows = 0 if not scale.dim() else 1 if scale.shape[0] == narrow.shape[0] else BLOCK
    return _by_parts(_widen, narrow, scale, block_rows, dtype)


def _by_parts(
    function: Callable[..., Tensor], x: Tensor, scale: Tensor, block_rows: int, dtype: torch.dtype, *options: Any
) -> Tensor:
    """An elementwise function of a matrix and its scales, contiguous."""
    kernel, parts = _kernel(function, x.device.type), list(_parts(x, block_rows))
    if len(parts) == 1:
        return kernel(x, scale, block_rows, dtype, *options).contiguous()
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, blocks in parts:
        result[part] = kernel(x[part], scale[blocks] if block_rows else scale, block_rows, dtype, *options)
    return result


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, in fp32, without a copy of it; 0 of nothing."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most).float()


def _amax(x: Tensor, block_rows: int) -> Tensor:
    """The largest magnitude of a matrix, or of each block of it."""
    if not block_rows:
        return amax(x)
    if not x.numel():
        return torch.zeros(scale_shape(x.shape[0], x.shape[1], block_rows), device=x.device)
    find = _kernel(_amax_of_blocks, x.device.type)
    return torch.cat([find(x[part], block_rows) for part, _ in _parts(x, block_rows)])


def _amax_of_blocks(x: Tensor, block_rows: int) -> Tensor:
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % BLOCK, 0, -rows % block_rows))
    blocks = padded.view(-(-rows // block_rows), block_rows, -(-columns // BLOCK), BLOCK)
    return blocks.amax((1, 3)).float()


def _round(x: Tensor, scale: Tensor, block_rows: int, dtype: torch.dtype, largest: float) -> Tensor:
    return (x.float() / _spread(scale, block_rows, x)).clamp(-largest, largest).to(dtype)


def _widen(narrow: Tensor, scale: Tensor, block_rows: int, dtype: torch.dtype) -> Tensor:
    return (narrow.float() * _spread(scale, block_rows, narrow)).to(dtype)


def _spread(scale: Tensor, block_rows: int, like: Tensor) -> Tensor:
    """The scale of each element, or the one for all."""
    if not block_rows:
        return scale
    rows, columns = (torch.arange(size, device=like.device) for size in like.shape)
    return scale[(rows // block_rows)[:, None], (columns // BLOCK)[None]]


@functools.cache
def _kernel(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """On CUDA as one kernel, generated at its first use: one after the other, its operators would take longer than an
    8-bit product saves."""
    if device_type != "cuda":
        return function
    compiled: Any = torch.compile(function, dynamic=True)
    return compiled


def _parts(x: Tensor, block_rows: int) -> Iterator[tuple[slice, slice]]:
    """Rows that are widened at a time, and which rows of blocks they are; a generated kernel holds nothing wide."""
    step = max(1, block_rows)
    rows = x.shape[0] if x.device.type == "cuda" else PART_ELEMENTS // max(1, x.shape[1])
    rows = max(1, -(-rows // step)) * step
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows), slice(start // step, (start + rows) // step)

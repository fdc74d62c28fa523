"""Numbers in 8 bits: what a tensor is divided by, rounded to, and multiplied with again.

Formats and their use after Micikevicius et al. 2022 (arXiv:2209.05433): e4m3 (3 bits of mantissa, up to 448) for
values, e5m2 (2 bits, up to 57,344) for gradients. A scale is what a rounded value is multiplied with; it makes the
largest magnitude of its tensor, or of its tile of it, the format's largest. Tiles after DeepSeek-V3 (2024,
arXiv:2412.19437): 128 values along what a product sums over, 128 by 128 of weights, scales in fp32; and after the OCP
Microscaling Formats (MX) specification 1.0 (2023): 32 values along what is summed over, scales that are powers of two,
rounded up (Mishra et al. 2025, arXiv:2506.08027) so that nothing lies beyond the format's largest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
PART_ELEMENTS = 2**22
"""So many are widened to fp32 at a time on the CPU: 16 MB."""


@dataclass(frozen=True)
class Tile:
    """What has one scale."""

    rows: int
    columns: int
    scale_dtype: torch.dtype = torch.float32


LONGEST = 128
"""No tile has a longer side."""
WHOLE = ""
"""A whole tensor with one scale."""
TILES = {
    "1x128": Tile(1, 128),
    "128x1": Tile(128, 1),
    "128x128": Tile(128, 128),
    "1x32": Tile(1, 32, E8M0),
    "32x1": Tile(32, 1, E8M0),
}
"""By name: rows by columns."""


def turned(tile: str) -> str:
    """Of the transposed matrix."""
    return "x".join(reversed(tile.split("x")))


def tile_of(values: Tensor, scale: Tensor) -> str:
    """By which tiles a matrix was quantised. Raises ValueError where its scales are none of it."""
    if not scale.dim():
        return WHOLE
    rows, columns = values.shape
    for name, tile in TILES.items():
        if tile.scale_dtype == scale.dtype and tuple(scale.shape) == scale_shape(rows, columns, name):
            return name
    raise ValueError(f"scales of {list(scale.shape)} in {scale.dtype} are none of a matrix of {list(values.shape)}")


def scale_shape(rows: int, columns: int, tile: str) -> tuple[int, ...]:
    """Of the scales of a matrix: one number, or one for each tile."""
    return (-(-rows // TILES[tile].rows), -(-columns // TILES[tile].columns)) if tile else ()


def quantize(x: Tensor, dtype: torch.dtype, tile: str = WHOLE) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, contiguous, and its scales in fp32, or in e8m0 for tiles of 32.

    A value that is not finite makes its whole tensor, or tile, not a number: a loss scale's check sees it.
    """
    scale = scale_of(_amax(x, tile), dtype)
    if tile and TILES[tile].scale_dtype == E8M0:
        scale = _power_of_two(scale)
    narrow = _by_parts(_round, x, scale, tile, dtype, torch.finfo(dtype).max)
    return narrow, scale.to(TILES[tile].scale_dtype) if tile else scale


def quantize_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix in 8 bits by a scale that is given; what lies beyond the format's largest becomes that."""
    return _by_parts(_round, x, scale, WHOLE, dtype, torch.finfo(dtype).max)


def scale_of(largest_magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """What makes a magnitude the largest of a format. Zeros, and what is nearly that, would have a scale of 0."""
    return (largest_magnitude / torch.finfo(dtype).max).clamp_min_(torch.finfo(torch.float32).tiny)


def _power_of_two(scale: Tensor) -> Tensor:
    """The least one that is not below each; of what is not finite, not a number."""
    mantissa, exponent = torch.frexp(scale)
    found = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(scale.isfinite(), found, torch.nan)


def dequantize(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantize` has rounded, in `dtype`, contiguous."""
    return _by_parts(_widen, narrow, scale.float(), tile_of(narrow, scale), dtype)


def _by_parts(
    function: Callable[..., Tensor], x: Tensor, scale: Tensor, tile: str, dtype: torch.dtype, *options: Any
) -> Tensor:
    """An elementwise function of a matrix and its scales, contiguous."""
    kernel, parts = _kernel(function, x.device.type), list(_parts(x, tile))
    if len(parts) == 1:
        return kernel(x, scale, tile, dtype, *options).contiguous()
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    for part, tiles in parts:
        result[part] = kernel(x[part], scale[tiles] if tile else scale, tile, dtype, *options)
    return result


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a tensor, in fp32, without a copy of it; 0 of nothing."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most).float()


def _amax(x: Tensor, tile: str) -> Tensor:
    """The largest magnitude of a matrix, or of each tile of it."""
    if not tile:
        return amax(x)
    if not x.numel():
        return torch.zeros(scale_shape(x.shape[0], x.shape[1], tile), device=x.device)
    find = _kernel(_amax_of_tiles, x.device.type)
    return torch.cat([find(x[part], tile) for part, _ in _parts(x, tile)])


def _amax_of_tiles(x: Tensor, tile: str) -> Tensor:
    (rows, columns), (high, wide) = x.shape, (TILES[tile].rows, TILES[tile].columns)
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % wide, 0, -rows % high))
    return padded.view(-(-rows // high), high, -(-columns // wide), wide).amax((1, 3)).float()


def _round(x: Tensor, scale: Tensor, tile: str, dtype: torch.dtype, largest: float) -> Tensor:
    return (x.float() / _spread(scale, tile, x)).clamp(-largest, largest).to(dtype)


def _widen(narrow: Tensor, scale: Tensor, tile: str, dtype: torch.dtype) -> Tensor:
    return (narrow.float() * _spread(scale, tile, narrow)).to(dtype)


def _spread(scale: Tensor, tile: str, like: Tensor) -> Tensor:
    """The scale of each element, or the one for all."""
    if not tile:
        return scale
    rows, columns = (torch.arange(size, device=like.device) for size in like.shape)
    return scale[(rows // TILES[tile].rows)[:, None], (columns // TILES[tile].columns)[None]]


@functools.cache
def _kernel(function: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """On CUDA as one kernel, generated at its first use: one after the other, its operators would take longer than an
    8-bit product saves."""
    if device_type != "cuda":
        return function
    compiled: Any = torch.compile(function, dynamic=True)
    return compiled


def _parts(x: Tensor, tile: str) -> Iterator[tuple[slice, slice]]:
    """Rows that are widened at a time, and which rows of tiles they are; a generated kernel holds nothing wide."""
    step = TILES[tile].rows if tile else 1
    rows = x.shape[0] if x.device.type == "cuda" else PART_ELEMENTS // max(1, x.shape[1])
    rows = max(1, -(-rows // step)) * step
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows), slice(start // step, (start + rows) // step)

"""Products on the 8-bit matrix units of a CUDA card: by torch, or by torchao where `MEMOPT_FP8=torchao` asks for it.

Each kernel takes two `Operand`s, [m, k] and [k, n], in a layout of its own. It is used on a card once it has computed a
test product there that agrees with the product of the dequantised operands. There is no other way to find out which
versions of CUDA, cuBLAS and Triton have which kernel on which card, and in which layout of scales; a wrong layout
silently gives wrong gradients.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from passes.ops.fp8_formats import E4M3, E5M2, TILES, WHOLE, dequantize, quantize, tile_of, turned

_FIRST_WITH_UNITS = (8, 9)
_TRUST_ERROR = 1e-2
"""The largest relative error, over all elements, that sums in fewer bits explain; a wrong scale exceeds it."""


class Operand(NamedTuple):
    """A quantised operand of a matrix product: its 8-bit values, its scales, and the tile ("1x128") that has one scale.
    The values may be the transpose of a matrix that is stored by rows."""

    values: Tensor
    scale: Tensor
    tile: str

    @classmethod
    def of(cls, values: Tensor, scale: Tensor, turn: bool) -> Operand:
        """Returns the operand for a quantised matrix with its scales, or, if `turn`, for its transpose."""
        tile = tile_of(values, scale)
        return cls(values.t(), scale.t(), turned(tile)) if turn else cls(values, scale, tile)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """Returns the operand dequantised to `dtype`."""
        if self.values.is_contiguous():
            return dequantize(self.values, self.scale, dtype)
        return dequantize(self.values.t(), self.scale.t(), dtype).t()


Kernel = Callable[[Operand, Operand, torch.dtype], Tensor]


def kernel_for(a: Operand, b: Operand, dtype: torch.dtype) -> Kernel | None:
    """Returns a kernel that computes `a @ b` in `dtype` on the device's 8-bit matrix units, and has been tested on the
    device; None if there is none for operands of these sizes, tiles and dtypes."""
    (rows, inner), columns = a.values.shape, b.values.shape[1]
    dtypes = a.values.dtype, b.values.dtype
    if not has_units(a.values.device) or why_not(rows, inner, columns, a.tile, b.tile, *dtypes):
        return None
    return _trusted(library(), a.values.device, a.tile, b.tile, *dtypes, dtype)


def library() -> str:
    """Returns the library whose kernels are tried first, "torch" or "torchao": that in the environment's `MEMOPT_FP8`,
    else "torch".

    Raises `ValueError` for another name."""
    name = os.environ.get("MEMOPT_FP8", "") or "torch"
    if name not in ("torch", "torchao"):
        raise ValueError(f"MEMOPT_FP8 is {name!r} in the environment; make it 'torch' or 'torchao', or leave it out")
    return name


@functools.cache
def has_units(device: torch.device) -> bool:
    """Returns whether a device has 8-bit matrix units: CUDA devices from Ada (compute capability 8.9) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_UNITS


def alignment(tile: str) -> int:
    """Returns the number of which a matrix's sizes must be multiples for 8-bit matrix units, given its tile ("1x128";
    "": one scale for the whole matrix)."""
    return max(TILES[tile].rows, TILES[tile].columns) if tile else 16


def why_not(
    rows: Any, inner: Any, columns: Any, a_tile: str = WHOLE, b_tile: str = WHOLE, a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
) -> str:  # fmt: skip
    """Returns why `a @ b`, [rows, inner] · [inner, columns], and the two products that compute its gradients, cannot
    run on 8-bit matrix units; "" if they can.

    The operands have the tiles `a_tile` and `b_tile` and the 8-bit dtypes `a` and `b`. Each of the three products sums
    over another of the three sizes."""
    if a == b == E5M2:
        return "no kernel multiplies e5m2 values by e5m2 values"
    if (a_tile, b_tile) not in _KERNELS:
        one, other = (tile or "the whole matrix" for tile in (a_tile, b_tile))
        return f"no kernel multiplies values scaled in tiles of {one} by values in tiles of {other}"
    multiple = max(alignment(a_tile), alignment(b_tile))
    for size, what in ((rows, "rows"), (inner, "columns of its input"), (columns, "columns of its result")):
        if not isinstance(size, int):
            return f"its number of {what} is not known"
        if size % multiple or not size:
            return f"its {size} {what} are no multiple of {multiple}"
    return ""


def whole(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b` in `dtype` for operands with one scale each; with fast accumulation unless one is in e5m2."""
    fast = a.values.dtype == b.values.dtype == E4M3 and a.values.is_cuda
    recipe = functional.ScalingType.TensorWise
    return _multiply(a, b, dtype, a.scale, b.scale, (recipe, recipe), use_fast_accum=fast)


def tiles_of_128(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b` in `dtype` for operands with tiles of 128, by torch, on compute capability 9.0 from CUDA 12.9 on.

    The scales of 1 by 128 tiles are passed in column-major order. Those of 128 by 128 tiles are contiguous along the
    summed dimension, which is padded to a multiple of four."""
    recipes: Any = functional.ScalingType
    if b.tile == "128x128":
        b_scale = _by_columns(functional.pad(b.scale, (0, 0, 0, -b.scale.shape[0] % 4), value=1.0))
        b_recipe = recipes.BlockWise128x128
    else:
        b_scale, b_recipe = _by_columns(b.scale.t()), recipes.BlockWise1x128
    return _multiply(a, b, dtype, _by_columns(a.scale), b_scale, (recipes.BlockWise1x128, b_recipe))


def tiles_of_128_by_torchao(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b` in `dtype` for operands with tiles of 128, by torchao's Triton kernels. These are tuned at the
    first use of a size; the card needs 8-bit matrix units."""
    kernels: Any = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    left, right, a_scale = a.values.contiguous(), _by_columns(b.values), _by_columns(a.scale)
    if b.tile == "128x128":
        return kernels.triton_fp8_gemm_1x128_128x128(left, right, a_scale, _by_columns(b.scale), out_dtype=dtype)
    return kernels.triton_fp8_gemm_1x128_128x1(left, right, a_scale, b.scale.contiguous(), out_dtype=dtype)


def tiles_of_32(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b` in `dtype` for operands with tiles of 32 (MXFP8), by torch, from compute capability 10.0 on."""
    recipe = functional.ScalingType.BlockWise1x32
    swizzle: Any = functional.SwizzleType.SWIZZLE_32_4_4
    scales = swizzled(a.scale), swizzled(b.scale.t())
    return _multiply(a, b, dtype, *scales, (recipe, recipe), swizzle_a=swizzle, swizzle_b=swizzle)


def swizzled(scale: Tensor) -> Tensor:
    """Returns the scales, [rows, groups of 32], as one dimension in the order in which tensor cores read them.

    128 rows by 4 groups make 512 bytes, in which rows 32 apart are adjacent (cuBLAS, "1D block scaling factors
    layout")."""
    rows, groups = scale.shape
    bits = functional.pad(scale.view(torch.uint8), (0, -groups % 4, 0, -rows % 128))
    parts = bits.view(bits.shape[0] // 128, 4, 32, bits.shape[1] // 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


_KERNELS: dict[tuple[str, str], Kernel] = {
    (WHOLE, WHOLE): whole,
    ("1x128", "128x128"): tiles_of_128,
    ("1x128", "128x1"): tiles_of_128,
    ("1x32", "32x1"): tiles_of_32,
}
"""torch's kernels, by the tiles of the operands."""
_OF_TORCHAO: dict[tuple[str, str], Kernel] = {
    ("1x128", "128x128"): tiles_of_128_by_torchao,
    ("1x128", "128x1"): tiles_of_128_by_torchao,
}


def _multiply(
    a: Operand, b: Operand, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, recipes: tuple[Any, Any],
    **options: Any,
) -> Tensor:  # fmt: skip
    """Multiplies by torch, which needs the rows of `a` and the columns of `b` to be contiguous."""
    multiply: Any = functional.scaled_mm
    left, right = a.values.contiguous(), _by_columns(b.values)
    return multiply(left, right, a_scale, recipes[0], b_scale, recipes[1], output_dtype=dtype, **options)


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


@functools.cache
def _trusted(
    library: str, device: torch.device, a_tile: str, b_tile: str, a: torch.dtype, b: torch.dtype, dtype: torch.dtype
) -> Kernel | None:
    """Returns the first kernel that computes a test product correctly on a device, or None."""
    tiles = a_tile, b_tile
    kernels = [_OF_TORCHAO[tiles]] if library == "torchao" and tiles in _OF_TORCHAO else []
    operands = _example(device, a_tile, a, 0), _example(device, b_tile, b, 1)
    expected = operands[0].wide(torch.float32) @ operands[1].wide(torch.float32)
    return next((kernel for kernel in (*kernels, _KERNELS[tiles]) if _agrees(kernel, operands, dtype, expected)), None)


def _example(device: torch.device, tile: str, dtype: torch.dtype, side: int) -> Operand:
    """Returns the left operand, [256, 640], of a test product, or for `side` 1 the right one, [640, 384]. Their tiles
    differ widely in scale, and their dimensions in the number of tiles."""
    generator = torch.Generator().manual_seed(side)
    shape = (256, 640) if not side else (640, 384)
    spread = torch.randn(-(-shape[0] // 32), -(-shape[1] // 32), generator=generator).mul_(2).exp_()
    values = torch.randn(shape, generator=generator) * torch.kron(spread, torch.ones(32, 32))
    narrow, scale = quantize(values, dtype, tile)
    return Operand(narrow.to(device), scale.to(device), tile)


def _agrees(kernel: Kernel, operands: tuple[Operand, Operand], dtype: torch.dtype, expected: Tensor) -> bool:
    try:
        found = kernel(*operands, dtype).float()
    except Exception:  # other versions may raise anything
        return False
    return bool((found - expected).norm() < _TRUST_ERROR * expected.norm())


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, turn_a: bool, turn_b: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Returns `(a · a_scale) @ (b · b_scale) + bias`, [m, n], in `dtype`.

    `a` is [m, k] in 8 bits, or [k, m] with `turn_a`; `b` is [k, n], or [n, k] with `turn_b`; `bias` is [n]. The scales
    are those that `quantize` returns for the matrices as given: one number, or one for each tile."""
    left, right = Operand.of(a, a_scale, turn_a), Operand.of(b, b_scale, turn_b)
    kernel = kernel_for(left, right, dtype)
    if kernel is None:
        # Products and sums in fp32 on the CPU; a card without such units has 16-bit ones.
        wide = torch.float32 if a.device.type == "cpu" else dtype
        result = (left.wide(wide) @ right.wide(wide)).to(dtype)
    else:
        result = kernel(left, right, dtype)
    return result if bias is None else result.add_(bias)

"""8-bit matrix products on the units of a CUDA card: by torch, or by torchao where `MEMOPT_FP8=torchao` asks for it.

Each takes what `Operand` describes, [m, k] and [k, n], and wants it laid out in its own way. A kernel is trusted on a
card when it has given there, once, what a product of wider copies gives: which versions of CUDA, cuBLAS and Triton have
which kernel on which card, and in which layout of scales, is not to be found out otherwise, and one that takes scales
for those of other tiles gives wrong gradients in silence.
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
"""Of all elements as one row: sums in 16 bits, or in the fewer of fast sums, are within; a wrong scale is not."""


class Operand(NamedTuple):
    """A quantised matrix, as it is multiplied: perhaps the transpose of one that lies in memory by rows."""

    values: Tensor
    scale: Tensor
    tile: str

    @classmethod
    def of(cls, values: Tensor, scale: Tensor, turn: bool) -> Operand:
        """`turn`: whether its transpose is multiplied."""
        tile = tile_of(values, scale)
        return cls(values.t(), scale.t(), turned(tile)) if turn else cls(values, scale, tile)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """In `dtype`, from its values as they lie in memory."""
        if self.values.is_contiguous():
            return dequantize(self.values, self.scale, dtype)
        return dequantize(self.values.t(), self.scale.t(), dtype).t()


Kernel = Callable[[Operand, Operand, torch.dtype], Tensor]


def kernel_for(a: Operand, b: Operand, dtype: torch.dtype) -> Kernel | None:
    """What multiplies such operands on their device's units, and is trusted; None where nothing does."""
    (rows, inner), columns = a.values.shape, b.values.shape[1]
    dtypes = a.values.dtype, b.values.dtype
    if not has_units(a.values.device) or why_not(rows, inner, columns, a.tile, b.tile, *dtypes):
        return None
    return _trusted(library(), a.values.device, a.tile, b.tile, *dtypes, dtype)


def library() -> str:
    """Whose kernels are tried first, by `MEMOPT_FP8` in the environment; torch's are where that says nothing.

    Raises ValueError where it names neither.
    """
    name = os.environ.get("MEMOPT_FP8", "") or "torch"
    if name not in ("torch", "torchao"):
        raise ValueError(f"MEMOPT_FP8 is {name!r} in the environment; make it 'torch' or 'torchao', or leave it out")
    return name


@functools.cache
def has_units(device: torch.device) -> bool:
    """Whether a device multiplies in 8 bits: CUDA's from Ada (compute capability 8.9) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_WITH_UNITS


def alignment(tile: str) -> int:
    """Sizes of what is multiplied on units are multiples of this."""
    return max(TILES[tile].rows, TILES[tile].columns) if tile else 16


def why_not(
    rows: Any, inner: Any, columns: Any, a_tile: str = WHOLE, b_tile: str = WHOLE, a: torch.dtype = E4M3,
    b: torch.dtype = E4M3,
) -> str:  # fmt: skip
    """Why [rows, inner] · [inner, columns] and its gradients' products cannot run on CUDA's 8-bit units; empty where
    they can: the sizes take turns as rows, columns and what is summed over."""
    if a == b == E5M2:
        return "e5m2 by e5m2 has no kernel"
    if (a_tile, b_tile) not in _KERNELS:
        return f"tiles of {a_tile or 'all'} by {b_tile or 'all'} have no kernel"
    multiple = max(alignment(a_tile), alignment(b_tile))
    for size, what in ((rows, "rows"), (inner, "columns of its input"), (columns, "columns of its result")):
        if not isinstance(size, int):
            return f"its number of {what} is not known"
        if size % multiple or not size:
            return f"its {size} {what} are no multiple of {multiple}"
    return ""


def whole(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """One scale each. Sums are fast where no gradient is among what is summed."""
    fast = a.values.dtype == b.values.dtype == E4M3 and a.values.is_cuda
    recipe = functional.ScalingType.TensorWise
    return _multiply(a, b, dtype, a.scale, b.scale, (recipe, recipe), use_fast_accum=fast)


def tiles_of_128(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """By torch, on compute capability 9.0 with CUDA 12.9. Of 1 by 128 scales lie by columns; of 128 by 128 so that the
    next along what is summed over is the next in memory, and four, or a multiple of them, make a row."""
    recipes: Any = functional.ScalingType
    if b.tile == "128x128":
        b_scale = _by_columns(functional.pad(b.scale, (0, 0, 0, -b.scale.shape[0] % 4), value=1.0))
        b_recipe = recipes.BlockWise128x128
    else:
        b_scale, b_recipe = _by_columns(b.scale.t()), recipes.BlockWise1x128
    return _multiply(a, b, dtype, _by_columns(a.scale), b_scale, (recipes.BlockWise1x128, b_recipe))


def tiles_of_128_by_torchao(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """By torchao's Triton kernels, which are timed at first for each size, on any card that has units."""
    kernels: Any = importlib.import_module("torchao.prototype.blockwise_fp8_training.kernels")
    left, right, a_scale = a.values.contiguous(), _by_columns(b.values), _by_columns(a.scale)
    if b.tile == "128x128":
        return kernels.triton_fp8_gemm_1x128_128x128(left, right, a_scale, _by_columns(b.scale), out_dtype=dtype)
    return kernels.triton_fp8_gemm_1x128_128x1(left, right, a_scale, b.scale.contiguous(), out_dtype=dtype)


def tiles_of_32(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """MXFP8 by torch, from compute capability 10.0 on."""
    recipe = functional.ScalingType.BlockWise1x32
    swizzle: Any = functional.SwizzleType.SWIZZLE_32_4_4
    scales = swizzled(a.scale), swizzled(b.scale.t())
    return _multiply(a, b, dtype, *scales, (recipe, recipe), swizzle_a=swizzle, swizzle_b=swizzle)


def swizzled(scale: Tensor) -> Tensor:
    """One row of the scales, by rows of the operand and groups of 32 along its sum, as tensor cores read them: 128 rows
    by 4 groups in 512 bytes, of these the rows 32 apart beside each other (cuBLAS, "1D block scaling factors layout").
    """
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
"""torch's, by the tiles of the operands."""
_OF_TORCHAO: dict[tuple[str, str], Kernel] = {
    ("1x128", "128x128"): tiles_of_128_by_torchao,
    ("1x128", "128x1"): tiles_of_128_by_torchao,
}


def _multiply(
    a: Operand, b: Operand, dtype: torch.dtype, a_scale: Tensor, b_scale: Tensor, recipes: tuple[Any, Any],
    **options: Any,
) -> Tensor:  # fmt: skip
    """By torch, which takes rows of `a` and columns of `b` that are contiguous."""
    multiply: Any = functional.scaled_mm
    left, right = a.values.contiguous(), _by_columns(b.values)
    return multiply(left, right, a_scale, recipes[0], b_scale, recipes[1], output_dtype=dtype, **options)


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


@functools.cache
def _trusted(
    library: str, device: torch.device, a_tile: str, b_tile: str, a: torch.dtype, b: torch.dtype, dtype: torch.dtype
) -> Kernel | None:
    """The first kernel that has given the right product on a device."""
    tiles = a_tile, b_tile
    kernels = [_OF_TORCHAO[tiles]] if library == "torchao" and tiles in _OF_TORCHAO else []
    operands = _example(device, a_tile, a, 0), _example(device, b_tile, b, 1)
    expected = operands[0].wide(torch.float32) @ operands[1].wide(torch.float32)
    return next((each for each in (*kernels, _KERNELS[tiles]) if _agrees(each, operands, dtype, expected)), None)


def _example(device: torch.device, tile: str, dtype: torch.dtype, side: int) -> Operand:
    """[256, 640] · [640, 384], whose tiles differ in scale by much, and in all numbers of which they have."""
    generator = torch.Generator().manual_seed(side)
    shape = (256, 640) if not side else (640, 384)
    spread = torch.randn(-(-shape[0] // 32), -(-shape[1] // 32), generator=generator).mul_(2).exp_()
    values = torch.randn(shape, generator=generator) * torch.kron(spread, torch.ones(32, 32))
    narrow, scale = quantize(values, dtype, tile)
    return Operand(narrow.to(device), scale.to(device), tile)


def _agrees(kernel: Kernel, operands: tuple[Operand, Operand], dtype: torch.dtype, expected: Tensor) -> bool:
    try:
        found = kernel(*operands, dtype).float()
    except Exception:  # what an unknown version raises is unknown
        return False
    return bool((found - expected).norm() < _TRUST_ERROR * expected.norm())

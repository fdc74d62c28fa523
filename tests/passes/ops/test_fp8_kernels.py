"""8-bit products on units: which there are, how they want their scales, and that none is trusted unseen."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from memopt.device.devices import hardware_of
from passes.ops import fp8_kernels
from passes.ops.fp8_formats import E4M3, E5M2, E8M0, TILES, WHOLE, quantize, turned
from passes.ops.fp8_kernels import (
    Kernel,
    Operand,
    kernel_for,
    library,
    scaled_matmul,
    swizzled,
    tiles_of_32,
    tiles_of_128,
    whole,
    why_not,
)
from passes.ops.fp8_ops import SCALINGS
from tests.passes.operators import norm_error

ROWS, INNER, COLUMNS = 256, 640, 384
BF16 = torch.bfloat16
PAIRS: dict[tuple[str, str], Kernel] = {
    ("1x128", "128x128"): tiles_of_128,
    ("1x128", "128x1"): tiles_of_128,
    ("1x32", "32x1"): tiles_of_32,
}


def operands(tiles: tuple[str, str], *, turn: bool = False) -> tuple[Operand, Operand]:
    """Operands whose values differ in size from block to block; `turn`: both are stored transposed."""
    torch.manual_seed(0)
    found = []
    for (rows, columns), tile in zip(((ROWS, INNER), (INNER, COLUMNS)), tiles, strict=True):
        spread = torch.kron(torch.randn(rows // 32, columns // 32).mul(2).exp(), torch.ones(32, 32))
        values = torch.randn(rows, columns) * spread
        made = Operand(*quantize(values, E4M3, tile), tile)
        found.append(made._replace(values=made.values.t().contiguous().t()) if turn else made)
    return found[0], found[1]


def read_by_128(scale: Tensor, rows: int, sums: int, recipe: Any) -> Tensor:
    """The scale of each element of [rows, sums], as `torch._scaled_mm_v2` documents where it looks for it."""
    sums //= 128
    if recipe is functional.ScalingType.BlockWise1x128:
        assert scale.shape == (rows, sums)
        assert scale.stride() == (1, rows)
        return scale.repeat_interleave(128, 1)
    padded = -(-sums // 4) * 4
    assert scale.shape == (padded, rows // 128)
    assert scale.stride() == (1, padded)
    return scale[:sums].t().repeat_interleave(128, 0).repeat_interleave(128, 1)


def read_by_32(scale: Tensor, rows: int, sums: int, recipe: Any) -> Tensor:
    """As cuBLAS documents: of 128 rows by 4 groups, row r and group g are at 16 · (r mod 32) + 4 · (r div 32) + g."""
    assert recipe is functional.ScalingType.BlockWise1x32
    assert scale.dtype == E8M0
    groups = sums // 32
    across = -(-groups // 4)
    assert scale.numel() == 512 * across * -(-rows // 128)
    row, group = torch.arange(rows)[:, None], torch.arange(groups)[None]
    tile = row // 128 * across + group // 4
    place = 512 * tile + 16 * (row % 128 % 32) + 4 * (row % 128 // 32) + group % 4
    return scale.float()[place].repeat_interleave(32, 1)


def units(read: Callable[[Tensor, int, int, Any], Tensor]) -> Callable[..., Tensor]:
    """A product as the units compute it, which finds scales only where they have to be."""

    def multiply(a: Tensor, b: Tensor, s: Tensor, of_a: Any, t: Tensor, of_b: Any, **options: Any) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        wide_a = a.float() * read(s, *a.shape, of_a)
        wide_b = b.float() * read(t, b.shape[1], b.shape[0], of_b).t()
        return (wide_a @ wide_b).to(options["output_dtype"])

    return multiply


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU as a card that has units."""
    monkeypatch.setattr(fp8_kernels, "has_units", lambda device: True)
    fp8_kernels._trusted.cache_clear()


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("tiles", PAIRS)
def test_scales_lie_where_units_look_for_them(
    tiles: tuple[str, str], turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = operands(tiles, turn=turn)
    monkeypatch.setattr(functional, "scaled_mm", units(read_by_32 if tiles[0] == "1x32" else read_by_128))
    found = PAIRS[tiles](a, b, torch.float32)
    assert norm_error(found, a.wide(torch.float32) @ b.wide(torch.float32)) < 1e-6


@pytest.mark.parametrize("tiles", PAIRS)
def test_torch_takes_what_it_is_given(tiles: tuple[str, str]) -> None:
    """Its own checks of shapes and strides, by the kernel for meta tensors."""
    a, b = (Operand(tile.values.to("meta"), tile.scale.to("meta"), tile.tile) for tile in operands(tiles))
    assert PAIRS[tiles](a, b, BF16).shape == (ROWS, COLUMNS)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason=f"torch {torch.__version__} has no kernel of _scaled_mm_v2 for the CPU; torch 2.13 has one",
)
@pytest.mark.parametrize("turn_a", [False, True])
@pytest.mark.parametrize("turn_b", [False, True])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
def test_torchs_kernel_and_ours_agree(turn_a: bool, turn_b: bool, a_dtype: torch.dtype) -> None:
    """That for one scale each runs on the CPU too."""
    torch.manual_seed(0)
    a = quantize(torch.randn((INNER, ROWS) if turn_a else (ROWS, INNER)), a_dtype)
    b = quantize(torch.randn((COLUMNS, INNER) if turn_b else (INNER, COLUMNS)), E4M3)
    theirs = whole(Operand.of(*a, turn_a), Operand.of(*b, turn_b), torch.float32)
    ours = scaled_matmul(*a, *b, None, turn_a, turn_b, torch.float32)
    assert norm_error(ours, theirs) < 1e-6


@pytest.mark.usefixtures("card")
def test_a_kernel_is_used_that_gives_the_right_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", units(read_by_128))
    assert kernel_for(*operands(("1x128", "128x1")), BF16) is tiles_of_128
    assert kernel_for(*operands(("1x128", "128x128")), BF16) is tiles_of_128
    assert kernel_for(*operands((WHOLE, "128x1")), BF16) is None


def wrong(*_: Any, output_dtype: torch.dtype, **__: Any) -> Tensor:
    return torch.ones(ROWS, COLUMNS, dtype=output_dtype)


def raising(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("only supported on another card")


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("kernel", [wrong, raising])
def test_one_that_does_not_is_not(kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(("1x128", "128x1"))
    expected = a.wide(torch.float32) @ b.wide(torch.float32)
    monkeypatch.setattr(functional, "scaled_mm", kernel)
    assert kernel_for(a, b, BF16) is None
    found = scaled_matmul(a.values, a.scale, b.values, b.scale, None, False, False, torch.float32)
    assert norm_error(found, expected) < 1e-6


@pytest.mark.usefixtures("card")
def test_torchaos_kernels_come_first_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_torchao(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return (a.wide(torch.float32) @ b.wide(torch.float32)).to(dtype)

    given = operands(("1x128", "128x1"))
    monkeypatch.setattr(functional, "scaled_mm", units(read_by_128))
    monkeypatch.setitem(fp8_kernels._OF_TORCHAO, ("1x128", "128x1"), by_torchao)
    assert kernel_for(*given, BF16) is tiles_of_128
    monkeypatch.setenv("MEMOPT_FP8", "torchao")
    assert kernel_for(*given, BF16) is by_torchao
    monkeypatch.setenv("MEMOPT_FP8", "cutlass")
    with pytest.raises(ValueError, match="MEMOPT_FP8 is 'cutlass' in the environment; make it 'torch' or 'torchao'"):
        library()


def test_without_units_there_is_no_kernel() -> None:
    assert kernel_for(*operands(("1x32", "32x1")), BF16) is None


@pytest.mark.parametrize("shape", [(256, 20), (130, 5), (1, 1)])
def test_swizzled_scales_are_padded_with_zeros(shape: tuple[int, int]) -> None:
    scale = torch.full(shape, 2.0).to(E8M0)
    found = swizzled(scale)
    assert found.shape == (512 * math.ceil(shape[0] / 128) * math.ceil(shape[1] / 4),)
    assert int((found.view(torch.uint8) != 0).sum()) == scale.numel()


@pytest.mark.parametrize(
    ("sizes", "tiles", "reason"),
    [
        ((32, 16, 48), (WHOLE, WHOLE), ""),
        ((40, 16, 48), (WHOLE, WHOLE), "its 40 rows are no multiple of 16"),
        ((32, 24, 48), (WHOLE, WHOLE), "its 24 columns of its input are no multiple of 16"),
        ((32, 16, 10), (WHOLE, WHOLE), "its 10 columns of its result are no multiple of 16"),
        ((0, 16, 16), (WHOLE, WHOLE), "its 0 rows are no multiple of 16"),
        ((256, 128, 128), ("1x128", "128x128"), ""),
        ((192, 128, 128), ("1x128", "128x1"), "its 192 rows are no multiple of 128"),
        ((192, 128, 96), ("1x32", "32x1"), ""),
        ((192, 128, 80), ("1x32", "32x1"), "its 80 columns of its result are no multiple of 32"),
        (
            (128, 128, 128),
            ("128x1", "128x1"),
            "no kernel multiplies values scaled in tiles of 128x1 by values in tiles of 128x1",
        ),
    ],
)
def test_sizes_that_units_take(sizes: tuple[int, int, int], tiles: tuple[str, str], reason: str) -> None:
    assert why_not(*sizes, *tiles) == reason


def test_two_gradients_have_no_product() -> None:
    assert why_not(16, 16, 16, a=E5M2, b=E5M2) == "no kernel multiplies e5m2 values by e5m2 values"
    assert not why_not(16, 16, 16, a=E5M2, b=E4M3)


def test_as_torchao_rounds_to_mxfp8_and_lays_out_its_scales() -> None:
    mx, utils = (pytest.importorskip(f"torchao.prototype.mx_formats.{name}") for name in ("mx_tensor", "utils"))
    mode = mx.ScaleCalculationMode.RCEIL
    values = torch.randn(256, 160) * torch.randn(256, 160).mul(3).exp()
    scale, narrow = mx.to_mx(values, E4M3, 32, mode)
    found, found_scale = quantize(values, E4M3, "1x32")
    assert torch.equal(found_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(found.view(torch.uint8), narrow.view(torch.uint8))
    assert torch.equal(swizzled(found_scale).view(torch.uint8), utils.to_blocked(scale).view(torch.uint8))
    assert TILES["1x32"].scale_dtype == scale.dtype


def test_torchaos_kernels_by_tritons_interpreter() -> None:
    """On the CPU, in a process of its own: Triton reads that it shall interpret when it is imported."""
    for name in ("triton", "torchao"):
        pytest.importorskip(name)
    script = """
import torch
import triton.runtime.interpreter as interpreter
import torchao.prototype.blockwise_fp8_training.kernels as kernels
from passes.ops.fp8_kernels import tiles_of_128_by_torchao
from tests.passes.operators import norm_error
from tests.passes.ops.test_fp8_kernels import operands

patch_tensor = interpreter._patch_lang_tensor

def with_index(tensor, scope):
    # Triton 3.6 takes an array of one element for a number, which NumPy 2.4 refuses (triton-lang/triton#9171).
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

interpreter._patch_lang_tensor = with_index
for kernel in (kernels.triton_fp8_gemm_1x128_128x128_kernel, kernels.triton_fp8_gemm_1x128_128x1_kernel):
    kernel.configs = kernel.configs[:1]  # with more, they are timed on a card
for right in ("128x128", "128x1"):
    a, b = operands(("1x128", right), turn=True)
    found = tiles_of_128_by_torchao(a, b, torch.float32)
    assert norm_error(found, a.wide(torch.float32) @ b.wide(torch.float32)) < 1e-6
"""
    root, paths = Path(__file__).parents[3], [path for path in sys.path if path]
    settings = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *paths])}
    ran = subprocess.run([sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_on_a_card(scaling: str) -> None:
    """The card has the 8-bit units that the hardware table names, and products are those of wider copies."""
    by = SCALINGS[scaling]
    for right in {turned(by.weights), turned(by.values)}:
        a, b = (
            Operand(value.values.cuda(), value.scale.cuda(), value.tile)
            for value in operands((by.values, right), turn=True)
        )
        expected = a.wide(torch.float32) @ b.wide(torch.float32)
        kernel = kernel_for(a, b, BF16)
        assert (kernel is not None) == hardware_of(torch.device("cuda")).multiplies(by.values)
        found = scaled_matmul(a.values, a.scale, b.values, b.scale, None, False, False, BF16)
        assert norm_error(found.float(), expected) < 1e-2

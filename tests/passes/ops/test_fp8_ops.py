"""The operators of 8-bit layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from passes.ops import fp8_ops
from passes.ops.fp8_formats import E4M3, E5M2, TILES, WHOLE, Histories, fp8_delayed_scale, quantize, scale_shape, turned
from passes.ops.fp8_kernels import Operand
from passes.ops.fp8_ops import FP8_LINEAR, SCALINGS, fp8_dequantize, fp8_matmul, fp8_quantize, fp8_quantize_by
from tests.passes.operators import norm_error

ROWS, INNER, COLUMNS = 96, 160, 48
BF16 = torch.bfloat16
# Each factor of a product is off by 2^-4 at most and, evenly spread over a step, by 2^-4 / √3 in the mean: two of them
# are by 0.051, and by 0.081 where one is e5m2.
FORWARD_BOUND, GRADIENT_BOUND = 0.051, 0.081


def leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, ROWS // 2, INNER, dtype=dtype)
    return tuple(item.requires_grad_() for item in (x, torch.randn(COLUMNS, INNER), torch.randn(COLUMNS, dtype=dtype)))  # type: ignore[return-value]


def results(function: object, *given: Tensor, **options: object) -> list[Tensor]:
    """The result and the gradients for a random incoming one."""
    result: Tensor = function(*given, **options)  # type: ignore[operator]
    incoming = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result, *torch.autograd.grad(result, given, incoming)]


@pytest.mark.parametrize("scaling", ["current", "block", "mx"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_near_the_layer_in_fp32(scaling: str, dtype: torch.dtype) -> None:
    given = leaves(dtype)
    found = results(FP8_LINEAR, *given, scaling=scaling)
    expected = results(F.linear, *(tensor.detach().float().requires_grad_() for tensor in given))
    assert [found_one.dtype for found_one in found] == [dtype, dtype, torch.float32, dtype]
    for one, other, bound in zip(found, expected, (FORWARD_BOUND, GRADIENT_BOUND, GRADIENT_BOUND, 0.01), strict=True):
        assert norm_error(one.float(), other) < bound
    assert norm_error(found[0].float(), expected[0]) > 0.01  # 8 bits it is


@pytest.mark.parametrize("scaling", ["current", "block", "mx"])
def test_a_turned_weight_is_the_same_layer(scaling: str) -> None:
    x, weight, bias = leaves()
    other = weight.detach().t().contiguous().requires_grad_()
    found = results(FP8_LINEAR, x, other, bias, turned=True, scaling=scaling)
    result, of_x, of_weight, of_bias = results(FP8_LINEAR, x, weight, bias, scaling=scaling)
    assert found[2].is_contiguous()
    for one, other in zip(found, (result, of_x, of_weight.t(), of_bias), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_what_is_kept_is_in_8_bits(scaling: str) -> None:
    kept: list[Tensor] = []
    x, weight, bias = leaves(BF16)
    scale = fp8_delayed_scale(x, E4M3, "kept/x").detach() if scaling == "delayed" else None
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        FP8_LINEAR(x, weight, bias, scale, scaling=scaling, history="kept/g" if scale is not None else "")
    assert [tuple(tensor.shape) for tensor in kept if tensor.dtype == E4M3] == [(ROWS, INNER), (COLUMNS, INNER)]
    scales = sum(tensor.nbytes for tensor in kept if tensor.dtype != E4M3)
    assert scales <= (x.numel() + weight.numel()) // 16


@pytest.mark.parametrize("scaling", ["block", "mx"])
def test_every_product_is_of_tiles_along_its_sum(scaling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As units want both operands."""
    seen: list[tuple[str, ...]] = []

    def product(a: Tensor, s: Tensor, b: Tensor, t: Tensor, bias: Tensor | None, *turns: Any) -> Tensor:
        operands = Operand.of(a, s, turns[0]), Operand.of(b, t, turns[1])
        seen.append(tuple(operand.tile for operand in operands))
        return fp8_matmul(a, s, b, t, bias, *turns)

    monkeypatch.setattr(fp8_ops, "fp8_matmul", product)
    wide = [torch.randn(384, 256).requires_grad_(), torch.randn(128, 256).requires_grad_()]
    tile = SCALINGS[scaling].values
    right = turned(SCALINGS[scaling].weights)
    for turn in (False, True):
        given = [wide[0], wide[1].detach().t().contiguous().requires_grad_() if turn else wide[1]]
        results(FP8_LINEAR, *given, scaling=scaling, turned=turn)
    assert seen == [(tile, right), (tile, right), (tile, turned(tile))] * 2
    assert scale_shape(384, 256, tile) != scale_shape(384, 256, turned(tile))


def test_the_same_bits_again() -> None:
    x, weight, bias = leaves(BF16)
    for one, other in zip(results(FP8_LINEAR, x, weight, bias), results(FP8_LINEAR, x, weight, bias), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("tile", [WHOLE, *TILES])
def test_fakes_are_as_what_they_stand_for(tile: str) -> None:
    narrow, scale = quantize(torch.randn(96, 160), E4M3, tile)
    b, b_scale = quantize(torch.randn(48, 160), E4M3, tile)
    check = torch.library.opcheck
    check(fp8_quantize, (torch.randn(160, 96).t(), E4M3, tile), test_utils="test_faketensor")
    check(fp8_dequantize, (narrow, scale, BF16), test_utils="test_faketensor")
    given = narrow, scale, b, b_scale, torch.randn(48, dtype=BF16), False, True, BF16
    check(fp8_matmul, given, test_utils="test_faketensor")
    if not tile:
        check(fp8_quantize_by, (torch.randn(96, 160), scale, E5M2), test_utils="test_faketensor")


def test_delayed_scaling_is_near_the_layer_after_a_step() -> None:
    histories = Histories()
    prefix = histories.prefix
    x, weight, bias = leaves(BF16)
    expected = results(F.linear, *(tensor.detach().float().requires_grad_() for tensor in (x, weight, bias)))
    for _ in range(2):
        scale = fp8_delayed_scale(x, E4M3, f"{prefix}x").detach()
        linear = lambda *given: FP8_LINEAR(*given, scale, scaling="delayed", history=f"{prefix}g")  # noqa: B023, E731
        found = results(linear, x, weight, bias)
        for one, other in zip(found[:3], expected[:3], strict=True):
            assert norm_error(one.float(), other) < GRADIENT_BOUND

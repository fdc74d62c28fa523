"""Rounding to 8 bits and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.ops import fp8_formats
from passes.ops.fp8_formats import BLOCK, E4M3, E5M2, dequantize, quantize, quantize_by, scale_of, scale_shape

# Half of the distance between neighbours, of a number with so many bits behind the leading one; below the smallest
# normal number (2^-6 and 2^-14) the distance no longer shrinks.
HALF_STEP = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


def matrix(rows: int, columns: int, spread: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return (normal * torch.exp(spread * torch.randn(rows, columns, generator=generator))).to(dtype)


def scale_each(scale: Tensor, x: Tensor, block_rows: int) -> Tensor:
    """The scale of each element, by other means than the module's."""
    if not block_rows:
        return scale.expand(x.shape)
    wide = torch.kron(scale, torch.ones(block_rows, BLOCK))
    return wide[: x.shape[0], : x.shape[1]]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    spread=st.sampled_from([0.0, 2.0]),
    narrow=st.sampled_from([E4M3, E5M2]),
    block_rows=st.sampled_from([0, 1, BLOCK]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rounded_to_the_nearest_and_largest_to_largest(
    rows: int, columns: int, spread: float, narrow: torch.dtype, block_rows: int, dtype: torch.dtype
) -> None:
    x = matrix(rows, columns, spread, dtype)
    found, scale = quantize(x, narrow, block_rows)
    assert found.dtype == narrow
    assert scale.shape == scale_shape(rows, columns, block_rows)
    each = scale_each(scale, x, block_rows)
    relative, absolute = HALF_STEP[narrow]
    bound = torch.maximum(relative * x.float().abs(), absolute * each) * (1 + 1e-5)
    assert bool(((dequantize(found, scale, torch.float32) - x.float()).abs() <= bound).all())
    assert found.float().abs().max() == torch.finfo(narrow).max


@pytest.mark.parametrize("block_rows", [0, 1, BLOCK])
def test_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch, block_rows: int) -> None:
    x = matrix(500, 130, 1.0, torch.bfloat16)
    whole = quantize(x, E4M3, block_rows)
    wide = dequantize(*whole, torch.float32)
    monkeypatch.setattr(fp8_formats, "PART_ELEMENTS", 130 * 40)
    found = quantize(x, E4M3, block_rows)
    assert torch.equal(found[0].view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(found[1], whole[1])
    assert torch.equal(dequantize(*found, torch.float32), wide)


def test_zeros_stay_zeros() -> None:
    found, scale = quantize(torch.zeros(4, 4), E4M3, 0)
    assert torch.equal(dequantize(found, scale, torch.float32), torch.zeros(4, 4))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(value: float) -> None:
    x = matrix(4, 256, 0.0, torch.float32)
    x[1, 3] = value
    assert not bool(dequantize(*quantize(x, E5M2, 0), torch.float32).isfinite().any())
    blocks = dequantize(*quantize(x, E5M2, 1), torch.float32).isfinite()
    assert not bool(blocks[1, :BLOCK].any())
    assert bool(blocks[1, BLOCK:].all())


def test_a_transposed_matrix_comes_out_as_rows() -> None:
    x = matrix(32, 16, 0.0, torch.float32).t()
    found, scale = quantize(x, E4M3, 0)
    assert found.is_contiguous()
    assert torch.equal(found.float(), quantize(x.contiguous(), E4M3, 0)[0].float())
    assert dequantize(found.t().contiguous().t(), scale, torch.float32).is_contiguous()


def test_beyond_a_given_scale_is_the_largest() -> None:
    x = torch.tensor([[1.0, -10.0, 0.5]])
    found = quantize_by(x, scale_of(torch.tensor(2.0), E4M3), E4M3)
    assert found.float().tolist() == [[224.0, -448.0, 112.0]]

"""Tensors in 8 bits, block by block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.optimizers.state_optimizers import BLOCK, blocks_of, code_values, dequantize, quantize


def there_and_back(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    codes = torch.empty(values.numel(), dtype=torch.uint8)
    scales = torch.empty(blocks_of(values.numel()))
    quantize(values.clone(), codes, scales, signed=signed)
    return dequantize(codes, scales, signed=signed)


def test_the_codes_are_those_of_dynamic_trees() -> None:
    signed, positive = code_values(True), code_values(False)
    assert len(set(signed)) == len(set(positive)) == 256
    assert {0.0, 1.0} <= set(signed) & set(positive)
    # The first decade takes 64 steps of its 0.9 (128 without a sign), the last one.
    top = [value for value in signed if 0.1 < value < 1]
    assert len(top) == 64
    assert top[1] - top[0] == pytest.approx(0.9 / 64)
    assert len([value for value in positive if 0.1 < value < 1]) == 128
    assert min(value for value in signed if value > 0) == pytest.approx(0.55e-6)
    assert [-value for value in signed if value < 0] == [value for value in signed[::-1] if 0 < value < 1]


@settings(deadline=None)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 2**31), st.booleans(), st.sampled_from([1e-30, 1e-8, 1.0, 1e30]))
def test_each_value_takes_the_nearest_code_of_its_block(elements: int, seed: int, signed: bool, size: float) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * size
    values = values if signed else values.abs()
    found = there_and_back(values, signed=signed)
    book = torch.tensor(code_values(signed), dtype=torch.float64)
    for block, back in zip(values.split(BLOCK), found.split(BLOCK), strict=True):
        largest = block.abs().max().double()
        nearest = (block.double()[:, None] - book * largest).abs().min(dim=1).values
        assert ((back.double() - block.double()).abs() <= nearest + 1e-6 * largest).all()
        assert back[block == block.abs().max()].allclose(block.abs().max(), rtol=1e-6)


def test_zeros_small_ones_and_what_is_no_number() -> None:
    assert torch.equal(there_and_back(torch.zeros(300), signed=True), torch.zeros(300))
    second_moments = torch.zeros(BLOCK)
    second_moments[0], second_moments[1] = 1.0, 1e-12
    found = there_and_back(second_moments, signed=False)
    assert 0 < found[1] < 1e-6  # Adam divides by its root
    assert torch.equal(found[2:], torch.zeros(BLOCK - 2))
    for bad in (float("nan"), float("inf")):
        values = torch.ones(2 * BLOCK)
        values[3] = bad
        found = there_and_back(values, signed=True)
        assert not found[3].isfinite()
        assert torch.equal(found[BLOCK:], torch.ones(BLOCK))


def test_one_large_value_spoils_its_own_block_only() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4 * BLOCK, generator=generator)
    before = there_and_back(values, signed=True)
    values[5] = 1e6
    after = there_and_back(values, signed=True)
    assert torch.equal(after[BLOCK:], before[BLOCK:])
    assert not torch.equal(after[:BLOCK], before[:BLOCK])

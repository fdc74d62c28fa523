"""8-bit formats, and scales from earlier steps."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from passes.ops import fp8_formats
from passes.ops.fp8_formats import (
    E4M3,
    E5M2,
    E8M0,
    TILES,
    WHOLE,
    Histories,
    dequantize,
    fp8_delayed_scale,
    histories_of,
    histories_state,
    load_histories,
    quantize,
    quantize_by,
    scale_of,
    scale_shape,
    tile_of,
    turned,
)

# Half of the relative distance between neighbouring numbers of the format; below the smallest normal number
# (2^-6 and 2^-14) the distance no longer shrinks.
HALF_STEP = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


def matrix(rows: int, columns: int, spread: float, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    return (normal * torch.exp(spread * torch.randn(rows, columns, generator=generator))).to(dtype)


def scale_each(scale: Tensor, x: Tensor, tile: str) -> Tensor:
    """The scale of each element, by other means than the module's."""
    if not tile:
        return scale.expand(x.shape)
    high, wide = map(int, tile.split("x"))
    return torch.kron(scale.float(), torch.ones(high, wide))[: x.shape[0], : x.shape[1]]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    spread=st.sampled_from([0.0, 2.0]),
    narrow=st.sampled_from([E4M3, E5M2]),
    tile=st.sampled_from([WHOLE, *TILES]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rounded_to_the_nearest_and_largest_to_largest(
    rows: int, columns: int, spread: float, narrow: torch.dtype, tile: str, dtype: torch.dtype
) -> None:
    x = matrix(rows, columns, spread, dtype)
    found, scale = quantize(x, narrow, tile)
    assert found.dtype == narrow
    assert scale.shape == scale_shape(rows, columns, tile)
    each = scale_each(scale, x, tile)
    relative, absolute = HALF_STEP[narrow]
    bound = torch.maximum(relative * x.float().abs(), absolute * each) * (1 + 1e-5)
    assert bool(((dequantize(found, scale, torch.float32) - x.float()).abs() <= bound).all())
    largest, most = found.float().abs().max(), torch.finfo(narrow).max
    # A power of two that is not below the scale is less than twice as large.
    assert most / 2 <= largest <= most if scale.dtype == E8M0 else largest == most


@pytest.mark.parametrize("tile", [WHOLE, *TILES])
def test_in_parts_as_in_one(monkeypatch: pytest.MonkeyPatch, tile: str) -> None:
    x = matrix(500, 130, 1.0, torch.bfloat16)
    whole = quantize(x, E4M3, tile)
    wide = dequantize(*whole, torch.float32)
    monkeypatch.setattr(fp8_formats, "PART_ELEMENTS", 130 * 40)
    found = quantize(x, E4M3, tile)
    assert torch.equal(found[0].view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(found[1].float(), whole[1].float())
    assert torch.equal(dequantize(*found, torch.float32), wide)


def test_zeros_stay_zeros() -> None:
    for tile in (WHOLE, *TILES):
        assert torch.equal(dequantize(*quantize(torch.zeros(4, 4), E4M3, tile), torch.float32), torch.zeros(4, 4))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(value: float) -> None:
    x = matrix(4, 256, 0.0, torch.float32)
    x[1, 3] = value
    assert not bool(dequantize(*quantize(x, E5M2), torch.float32).isfinite().any())
    for tile, size in (("1x128", 128), ("1x32", 32)):
        finite = dequantize(*quantize(x, E5M2, tile), torch.float32).isfinite()
        assert not bool(finite[1, :size].any())
        assert bool(finite[1, size:].all())
        assert bool(finite[0].all())


def test_a_transposed_matrix_comes_out_as_rows() -> None:
    x = matrix(32, 16, 0.0, torch.float32).t()
    found, scale = quantize(x, E4M3)
    assert found.is_contiguous()
    assert torch.equal(found.float(), quantize(x.contiguous(), E4M3)[0].float())
    assert dequantize(found.t().contiguous().t(), scale, torch.float32).is_contiguous()


def test_beyond_a_given_scale_is_the_largest() -> None:
    x = torch.tensor([[1.0, -10.0, 0.5]])
    found = quantize_by(x, scale_of(torch.tensor(2.0), E4M3), E4M3)
    assert found.float().tolist() == [[224.0, -448.0, 112.0]]


@pytest.mark.parametrize("tile", list(TILES))
def test_by_which_tiles_is_told_from_the_scales(tile: str) -> None:
    values, scale = quantize(torch.randn(200, 300), E4M3, tile)
    assert tile_of(values, scale) == tile
    assert tile_of(values.t(), scale.t()) == turned(tile)
    with pytest.raises(ValueError, match=r"scales of .* do not fit a matrix of \[7, 300\]"):
        tile_of(values[:7], scale)


def test_a_power_of_two_is_the_least_with_which_nothing_is_beyond() -> None:
    """448 is e4m3's largest: a magnitude of 448 has a scale of 1, the next above it one of 2."""
    largest = torch.tensor([[448.0], [448.5], [447.5], [7.0], [3e38], [1e-44]])
    _, scale = quantize(largest.expand(6, 32), E4M3, "1x32")
    assert scale.dtype == E8M0
    expected = [1.0, 2.0, 1.0, 2.0**-6, 2.0**120, 2.0**-126]
    assert scale.float().flatten().tolist() == expected


def asking(histories: Histories) -> Callable[[float], float]:
    """The scale of a value, as the magnitude that becomes the format's largest number."""
    name = f"{histories.prefix}layer"
    return lambda value: float(fp8_delayed_scale(torch.tensor([value, -1.0]), E4M3, name) * 448)


def test_a_scale_is_of_the_largest_of_the_last_16() -> None:
    histories = Histories()
    ask = asking(histories)
    assert ask(3.0) == pytest.approx(3.0)  # nothing is known yet
    assert ask(8.0) == pytest.approx(3.0)
    assert ask(2.0) == pytest.approx(8.0)
    assert [ask(2.0) for _ in range(15)] == pytest.approx([8.0] * 15)
    assert ask(2.0) == pytest.approx(2.0)


def test_what_is_not_finite_is_not_remembered() -> None:
    histories = Histories()
    ask = asking(histories)
    ask(3.0)
    assert not torch.tensor(ask(float("inf"))).isfinite()
    assert ask(1.0) == pytest.approx(3.0)


def test_a_first_magnitude_that_is_not_finite_leaves_the_next_scale_to_its_own() -> None:
    """As in a run in fp16, whose first step overflows: it was a scale for zeros, by which all values became zeros."""
    histories = Histories()
    ask = asking(histories)
    ask(float("inf"))
    assert ask(3.0) == pytest.approx(3.0)


def test_each_owner_has_its_own() -> None:
    one, other = Histories(), Histories()
    asking(one)(8.0)
    assert asking(other)(2.0) == pytest.approx(2.0)
    assert asking(one)(2.0) == pytest.approx(8.0)


def test_histories_die_with_their_model() -> None:
    model = nn.Linear(2, 2)
    assert histories_of(model) is histories_of(model)
    ask = asking(histories_of(model))
    assert (ask(8.0), ask(2.0)) == pytest.approx((8.0, 8.0))
    del model
    gc.collect()
    assert (ask(2.0), ask(1.0)) == pytest.approx((2.0, 1.0))  # nobody remembers


def test_saved_and_loaded_into_another_model() -> None:
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert histories_state(one) == {}
    asking(histories_of(one[0]))(8.0)
    asking(histories_of(other))(5.0)
    load_histories(other, histories_state(one))
    assert asking(histories_of(other[0]))(2.0) == pytest.approx(8.0)
    assert asking(histories_of(other))(2.0) == pytest.approx(2.0)  # loading replaces what was remembered


def test_a_saved_state_does_not_change_with_later_steps() -> None:
    model = nn.Linear(2, 2)
    ask = asking(histories_of(model))
    ask(2.0)
    state = histories_state(model)
    ask(8.0)
    load_histories(model, state)
    assert ask(1.0) == pytest.approx(2.0)


def test_a_state_of_another_model_is_refused() -> None:
    one, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    asking(histories_of(one[0]))(8.0)
    with pytest.raises(ValueError, match="'0', a module that this model lacks; build the model as it was"):
        load_histories(other, histories_state(one))

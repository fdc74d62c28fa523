"""float32 to bfloat16 by chance, and split into halves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.optimizers.bf16_parameters import joined, round_stochastically, split

NAN, INFINITY = float("nan"), float("inf")


def halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    upper = torch.empty_like(value, dtype=torch.bfloat16)
    lower = torch.empty_like(value, dtype=torch.int16)
    split(value.clone(), upper, lower)
    return upper, lower


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_the_halves_give_every_float_back_and_the_upper_one_is_nearest(numbers: list[float]) -> None:
    value = torch.tensor(numbers)
    upper, lower = halves(value)
    assert torch.equal(joined(upper, lower).view(torch.int32), value.view(torch.int32))
    nearest = value.to(torch.bfloat16).float()
    finite = nearest.isfinite() & upper.isfinite()
    off, least = ((rounded.float() - value).abs()[finite] for rounded in (upper, nearest))
    assert torch.equal(off, least)  # of two that are equally near, either


def test_ties_negative_zero_and_what_is_no_number() -> None:
    patterns = [0x3F808000, 0x3F818000, -0x407F8000, -(2**31), 0x7F800000, -0x00800000, 0x7F7FFFFF]
    value = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    upper, lower = halves(value)
    assert joined(upper, lower).view(torch.int32).tolist() == patterns
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    upper, lower = halves(nans)
    assert upper.isnan().all()
    assert joined(upper, lower).isnan().all()


def stochastic(value: torch.Tensor, seed: int = 0) -> torch.Tensor:
    out = torch.empty_like(value, dtype=torch.bfloat16)
    round_stochastically(value.clone(), out, torch.Generator().manual_seed(seed))
    return out.float()


def test_chance_is_right_in_expectation_and_takes_neighbours_only() -> None:
    below, above = 1.0, 1.0 + 2**-7
    for part in (0.01, 0.3, 0.9):
        for sign in (1, -1):
            value = torch.full((100_000,), sign * (below + part * (above - below)))
            found = stochastic(value).mul(sign)
            assert set(found.unique().tolist()) == {below, above}
            # Five standard deviations of a mean of 100,000 coin throws.
            assert abs((found == above).double().mean().item() - part) < 5 * (part * (1 - part) / 100_000) ** 0.5


def test_chance_leaves_alone_what_needs_no_rounding() -> None:
    value = torch.tensor([0.0, -0.0, 1.0, -2.5, INFINITY, -INFINITY])
    assert torch.equal(stochastic(value).view(torch.int32), value.view(torch.int32))
    assert stochastic(torch.tensor([NAN, 0x7FFFFFFF])[:1]).isnan().all()
    canonical = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert stochastic(canonical).isnan().all()

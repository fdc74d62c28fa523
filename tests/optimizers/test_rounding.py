"""float32 to bfloat16 by chance."""

from __future__ import annotations

import torch

from memopt.optimizers.bf16_parameters import round_stochastically

NAN, INFINITY = float("nan"), float("inf")


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

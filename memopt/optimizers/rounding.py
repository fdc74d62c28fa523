"""Rounds float32 to bfloat16 without losing small changes: stochastically, or with the other 16 bits kept beside it.

A bfloat16 is the upper half of a float32. All functions work on the bits, with one int32 for each element.
"""

from __future__ import annotations

import torch

_HALF = 0x8000


def widened(value: torch.Tensor) -> torch.Tensor:
    """A new float32 tensor with the values of a bfloat16 tensor."""
    return value.detach().to(torch.float32, copy=True)


def round_stochastically(value: torch.Tensor, out: torch.Tensor, generator: torch.Generator) -> None:
    """Round float32 `value` to one of the two nearest bfloat16 values, into `out`; the nearer one is the likelier, so
    that the result is right in expectation.

    `value` is overwritten. Infinities and NaN stay. (Gupta et al. 2015, arXiv:1502.02551, section 3.)
    """
    bits = _bits(value)
    bits.add_(torch.empty_like(bits).random_(0, 2 * _HALF, generator=generator)).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits)


def split(value: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> None:
    """Write the nearest bfloat16 of float32 `value` to `upper`, and the remaining bits as int16 to `lower`.

    `joined` restores the value bit for bit. `value` is overwritten. NaN stays NaN.
    """
    bits = _bits(value)
    nearest = (bits + _HALF).bitwise_right_shift_(16)
    upper.view(torch.int16).copy_(nearest)
    lower.copy_(bits.sub_(nearest.bitwise_left_shift_(16)))


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """A new tensor of the float32 values that `split` divided."""
    bits = upper.detach().view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(lower).view(torch.float32)


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bits of the values, with the same NaN for all NaNs: adding to the bits of others could overflow into a
    number."""
    nan, infinity = float("nan"), float("inf")
    return value.nan_to_num_(nan=nan, posinf=infinity, neginf=-infinity).view(torch.int32)

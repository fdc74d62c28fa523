"""The microbatches between two optimiser steps, and the weights by which their mean losses make one mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from memopt.train.ranks import mean_over_ranks


@dataclass(frozen=True)
class EffectiveBatch:
    """What the calls since the last optimiser step have added up to. All tensors are 0-dimensional, on one device.

    Microbatch i with n_i tokens and the mean loss l_i is differentiated as l_i · n_i / `reference`. Once all tokens are
    known, gradients and loss are multiplied by `reference` / `tokens`, and are exactly those of the mean over all. The
    reference is the tokens expected: those of all microbatches where they come in one call, else the first call's times
    the number of calls. So no count is needed ahead, while fp16 sees gradients of about the final size, and equal
    counts give l_i / k to the bit.
    """

    calls: int
    reference: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor
    """The sum of the weighted losses."""

    @classmethod
    def empty(cls, device: torch.device) -> EffectiveBatch:
        # Apple's GPU has no float64; float32 counts exactly up to 16 million.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        nothing = torch.zeros((), dtype=dtype, device=device)
        return cls(0, nothing, nothing, nothing)

    def expecting(self, counts: Sequence[torch.Tensor], calls: int, model: nn.Module) -> EffectiveBatch:
        """With the reference set by the first of `calls` calls that has a token; `counts` are those of this call."""
        expected = calls * mean_over_ranks(torch.stack(list(counts)).sum(), model)
        return replace(self, calls=self.calls + 1, reference=torch.where(self.reference > 0, self.reference, expected))

    def weighted(self, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate. That of a microbatch without a token is 0/0, and counts as nothing."""
        weight = count / torch.where(self.reference > 0, self.reference, 1)
        weight = weight if loss.dtype is torch.float64 else weight.float()
        return torch.where(count > 0, loss * weight, 0)

    def plus(self, weighted_loss: torch.Tensor, count: torch.Tensor) -> EffectiveBatch:
        return replace(self, tokens=self.tokens + count, loss=self.loss + weighted_loss.detach())

    def over_ranks(self, model: nn.Module) -> EffectiveBatch:
        """With the means over the ranks that train `model`: what gradients are means of, too."""
        tokens, loss = mean_over_ranks(torch.stack((self.tokens, self.loss)), model)
        return replace(self, tokens=tokens, loss=loss)

    @property
    def correction(self) -> torch.Tensor:
        """What gradients are to be multiplied by; exactly 1 where the reference was right. Infinite without tokens."""
        return self.reference / self.tokens

    @property
    def mean_loss(self) -> torch.Tensor:
        """The mean over all tokens; NaN without any."""
        return self.loss * self.correction


def as_count(count: int | float | torch.Tensor, like: EffectiveBatch) -> torch.Tensor:
    """The count as a 0-dimensional tensor beside those of `like`, without waiting for the device."""
    home = like.tokens
    if isinstance(count, torch.Tensor) and count.device == home.device:
        return count.to(home.dtype)
    # A count on the host is written by a kernel; a copy would wait. One on another device has to be copied.
    value = count.item() if isinstance(count, torch.Tensor) and count.device.type == "cpu" else count
    if isinstance(value, torch.Tensor):
        return value.to(home.device, home.dtype, non_blocking=True)
    return torch.full((), float(value), dtype=home.dtype, device=home.device)

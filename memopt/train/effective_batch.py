"""The sums over the microbatches between two optimiser steps, and the weights that turn their means into one mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from memopt.compat.host import is_on_host
from memopt.train.ranks import mean_over_ranks


@dataclass(frozen=True)
class EffectiveBatch:
    """Sums over the calls since the last optimiser step. All tensors are 0-dimensional and on one device.

    The backward of microbatch i with n_i tokens and mean loss l_i is that of l_i · n_i / `reference`. Once all tokens
    are known, gradients and loss are multiplied by `reference` / `tokens`, which makes them exactly those of the mean
    over all tokens. The reference is the expected number of tokens: that of all microbatches where they come in one
    call, else that of the first call times the number of calls. So no count is needed ahead, gradients have about their
    final size in fp16, and with equal counts the weights are exactly 1 / k.
    """

    calls: int
    reference: torch.Tensor
    tokens: torch.Tensor
    loss: torch.Tensor
    """The sum of the weighted losses."""

    @classmethod
    def empty(cls, device: torch.device) -> EffectiveBatch:
        """An effective batch before its first call."""
        # Apple's GPU has no float64; float32 counts exactly up to 16 million.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        nothing = torch.zeros((), dtype=dtype, device=device)
        return cls(0, nothing, nothing, nothing)

    def expecting(self, counts: Sequence[torch.Tensor], calls: int, model: nn.Module) -> EffectiveBatch:
        """The same after a further call with these token `counts`. The first of the `calls` calls with a token sets the
        reference."""
        expected = calls * mean_over_ranks(torch.stack(list(counts)).sum(), model)
        return replace(self, calls=self.calls + 1, reference=torch.where(self.reference > 0, self.reference, expected))

    def weighted(self, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """The weighted loss, for the backward. A microbatch without a token has the loss 0/0, and is weighted to 0."""
        weight = count / torch.where(self.reference > 0, self.reference, 1)
        weight = weight if loss.dtype is torch.float64 else weight.float()
        return torch.where(count > 0, loss * weight, 0)

    def plus(self, weighted_loss: torch.Tensor, count: torch.Tensor) -> EffectiveBatch:
        """The sums with those of a further microbatch."""
        return replace(self, tokens=self.tokens + count, loss=self.loss + weighted_loss.detach())

    def over_ranks(self, model: nn.Module) -> EffectiveBatch:
        """The sums averaged over the ranks that train `model`, as gradients are."""
        tokens, loss = mean_over_ranks(torch.stack((self.tokens, self.loss)), model)
        return replace(self, tokens=tokens, loss=loss)

    @property
    def correction(self) -> torch.Tensor:
        """The factor for gradients: exactly 1 where the reference was right, and infinite without tokens."""
        return self.reference / self.tokens

    @property
    def mean_loss(self) -> torch.Tensor:
        """The mean over all tokens; NaN without any."""
        return self.loss * self.correction


def as_count(count: int | float | torch.Tensor, like: EffectiveBatch) -> torch.Tensor:
    """The count as a 0-dimensional tensor on the device of `like`, without waiting for that device."""
    home = like.tokens
    if isinstance(count, torch.Tensor) and count.device == home.device:
        return count.to(home.dtype)
    # A kernel writes a count from the host, since a copy would wait. A count on another device has to be copied.
    value = count.item() if isinstance(count, torch.Tensor) and is_on_host(count) else count
    if isinstance(value, torch.Tensor):
        return value.to(home.device, home.dtype, non_blocking=True)
    return torch.full((), float(value), dtype=home.dtype, device=home.device)

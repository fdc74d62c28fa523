"""Delayed scaling: the scale of a tensor from the largest magnitudes that it had in steps before.

After Transformer Engine's `DelayedScaling` (NVIDIA 2022): the largest of the last 16. `memopt::fp8_delayed_scale` alone
has state, a scale is all that it returns, and it is neither merged nor evaluated again; what is quantised by a scale is
pure. The state is kept in this process, by name, and belongs to no model: it is not in a `state_dict`, and a run that
is resumed starts with the magnitudes of its first batch.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from passes.ops.fp8_formats import amax, scale_of

LENGTH = 16
"""Evaluations that are remembered."""
_histories: dict[str, Tensor] = {}
_numbers = itertools.count()


def new_prefix() -> str:
    """What names of one model's histories may begin with: no other's do."""
    return f"{next(_numbers)}/"


@torch.library.custom_op("memopt::fp8_delayed_scale", mutates_args=())
def fp8_delayed_scale(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    """The scale for `x` in 8 bits by what is remembered under a name, of `x` itself where that is nothing; a scalar in
    fp32. Remembers `x` for later, unless it has what is not finite: then that scale is not a number, and is forgotten.
    """
    now = amax(x)
    known = _histories.get(history)
    if known is None or known.device != x.device:
        known = _histories[history] = now.masked_fill(~now.isfinite(), 0.0).repeat(LENGTH)
    largest = torch.where(now.isfinite(), known.amax(), now)
    _histories[history] = torch.cat([torch.where(now.isfinite(), now, known[:1].squeeze(0))[None], known[:-1]])
    return scale_of(largest, dtype)


@fp8_delayed_scale.register_fake
def _(x: Tensor, dtype: torch.dtype, history: str) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=x.device)


def _no_gradient(ctx: Any, of_scale: Tensor | None) -> tuple[None, None, None]:
    return None, None, None


fp8_delayed_scale.register_autograd(_no_gradient)


def forget(prefix: str) -> None:
    """Drop what is remembered under names that begin so."""
    for name in [each for each in _histories if each.startswith(prefix)]:
        del _histories[name]


DELAYED_SCALE: Any = torch.ops.memopt.fp8_delayed_scale.default

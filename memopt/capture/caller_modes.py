"""The modes of the caller's code under which a model runs: autocast, and the kernels that attention may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from memopt.compat.host import HOST
from memopt.device.devices import DEVICES


def autocast_is_on() -> bool:
    """Whether autocast is active for any device."""
    return any(map(torch.is_autocast_enabled, DEVICES))


def autocast_blocks() -> int:
    """The number of `torch.autocast` blocks that this thread is in, those that switch it off included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


_ATTENTION = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
}


def attention_kernels() -> tuple[SDPBackend, ...]:
    """The kernels that `scaled_dot_product_attention` may choose from now."""
    return tuple([kernel for kernel, is_allowed in _ATTENTION.items() if is_allowed()])  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class CallerModes:
    """The modes of the caller's code that decide which operators run, and that memopt must keep itself, since Dynamo
    has no guards on them or they end before the backward: autocast, and the kernels that attention may use."""

    types: tuple[tuple[str, torch.dtype], ...]
    """The device types for which autocast is on, each with its dtype."""
    cached: bool
    """Whether casts of weights are kept until the outermost autocast block ends."""
    within: bool = False
    """Whether the code is in an autocast block, even one that switches autocast off."""
    attention: tuple[SDPBackend, ...] = ()
    """The kernels that `scaled_dot_product_attention` may choose from (`torch.nn.attention.sdpa_kernel`)."""

    @classmethod
    def now(cls) -> CallerModes:
        """The modes of this thread now."""
        on = (device for device in DEVICES if torch.is_autocast_enabled(device))
        types = tuple((device, torch.get_autocast_dtype(device)) for device in on)
        return cls(types, torch.is_autocast_cache_enabled(), autocast_blocks() > 0, attention_kernels())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which these modes are set in place of the present ones."""
        present = CallerModes.now()
        wanted, given = dict(self.types), dict(present.types)
        with ExitStack() as blocks:
            for device in DEVICES:
                if present.cached != self.cached or wanted.get(device) != given.get(device):
                    how: Any = {"dtype": wanted.get(device), "enabled": device in wanted}
                    blocks.enter_context(torch.autocast(device, **how, cache_enabled=self.cached))
            if self.within and not autocast_blocks():
                blocks.enter_context(torch.autocast(HOST.type, enabled=False))
            if self.attention != present.attention:
                blocks.enter_context(sdpa_kernel(list(self.attention)))
            yield

"""The autocast around a region when it was recorded. It is not that of the model's call where the model switches
autocast on and its graph breaks inside: by a decorated `forward`, say, as Accelerate's mixed precision has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from memopt.device.devices import DEVICES


@dataclass(frozen=True)
class SurroundingAutocast:
    """The state of autocast at one moment."""

    types: tuple[tuple[str, torch.dtype], ...]
    """The device types for which autocast is on, each with its dtype."""
    cached: bool
    """Whether casts of weights are kept until the outermost block ends."""

    @classmethod
    def now(cls) -> SurroundingAutocast:
        """The present state."""
        on = (device for device in DEVICES if torch.is_autocast_enabled(device))
        return cls(
            tuple((device, torch.get_autocast_dtype(device)) for device in on), torch.is_autocast_cache_enabled()
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block in which autocast is as it was at that moment."""
        present = SurroundingAutocast.now()
        wanted, given = dict(self.types), dict(present.types)
        with ExitStack() as blocks:
            for device in DEVICES:
                if present.cached != self.cached or wanted.get(device) != given.get(device):
                    on = device in wanted
                    dtype = wanted.get(device)
                    blocks.enter_context(torch.autocast(device, dtype=dtype, enabled=on, cache_enabled=self.cached))
            yield

"""The link between the device and the host's memory, over which storages are offloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Two queues, one for each direction (PCIe and NVLink are full duplex), that move one storage at a time.

    Transfers run in parallel to compute. With a bandwidth of 0 nothing can be offloaded; with an infinite one a
    transfer takes the latency only.
    """

    bytes_per_second: float
    """Bandwidth of each direction."""
    latency_seconds: float = 0.0
    """Seconds added to every transfer."""
    host_bytes: int | None = None
    """The most bytes that may be on the host at one time; None for no limit."""

    def __post_init__(self) -> None:
        for name, value in (("bytes_per_second", self.bytes_per_second), ("latency_seconds", self.latency_seconds)):
            if math.isnan(value) or value < 0:
                raise ValueError(f"a link's {name} is 0 or more, not {value}")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"a link's host_bytes is 0 or more, or None for no limit, not {self.host_bytes}")

    def transfer_seconds(self, size_bytes: int) -> float:
        """Seconds for which a transfer of `size_bytes` occupies one direction; infinite without bandwidth."""
        if self.bytes_per_second == 0:
            return math.inf
        return self.latency_seconds + size_bytes / self.bytes_per_second

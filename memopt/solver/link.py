"""The road between the device and the host's memory, over which values can be offloaded."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """One way out and one way back (PCIe and NVLink are full duplex): each a queue that moves one storage at a time.

    Transfers run beside the compute. A bandwidth of 0 moves nothing; an infinite one costs the latency only.
    """

    bytes_per_second: float
    """Of each direction."""
    latency_seconds: float = 0.0
    """Added to every transfer."""
    host_bytes: int | None = None
    """Room on the host for what is offloaded at one time; None: as much as needed."""

    def __post_init__(self) -> None:
        for name, value in (("bytes_per_second", self.bytes_per_second), ("latency_seconds", self.latency_seconds)):
            if math.isnan(value) or value < 0:
                raise ValueError(f"a link's {name} is 0 or more, not {value}")
        if self.host_bytes is not None and self.host_bytes < 0:
            raise ValueError(f"a link's host_bytes is 0 or more, or None for no limit, not {self.host_bytes}")

    def transfer_seconds(self, size_bytes: int) -> float:
        """Seconds that one storage of `size_bytes` keeps one direction busy; infinite without bandwidth."""
        if self.bytes_per_second == 0:
            return math.inf
        return self.latency_seconds + size_bytes / self.bytes_per_second

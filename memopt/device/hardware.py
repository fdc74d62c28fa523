"""The rates of a device that time is estimated with, as a value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from memopt.solver import Link

# Seconds to start a copy and to wait for it, beside those for its bytes; an assumption.
_COPY_SECONDS = 20e-6
# Room for offloaded activations on the host of a card that is not here, as a multiple of the card's memory.
_HOST_SHARE = 2


@dataclass(frozen=True)
class Chip:
    """The multiprocessors of a card, by which its kernels are sized: their grids of thread blocks, and with them the
    buffers that blocks share."""

    multiprocessors: int
    threads: int
    """Threads that one multiprocessor runs at once."""


LARGE = Chip(132, 2048)
"""An H100's, for cards that are not known."""


@dataclass(frozen=True)
class Hardware:
    """The rates that time is estimated with. A measured device (`measure_hardware`) has efficiencies of 1."""

    name: str
    flops: Mapping[str, float]
    """Dense peak in FLOP/s by dtype name (`"bfloat16"`); 16 and 8 bits with fp32 accumulation, as torch asks for it.
    `"float32"` is without tensor cores, as torch's matmuls are by default, `"tfloat32"` with them; 8-bit products that
    have a scale for each tile have names of their own (`scaled_rate`)."""
    bytes_per_second: float
    launch_seconds: float
    """Seconds of the smallest kernel: dispatch in eager mode, and launch."""
    memory_bytes: int
    source: str
    flops_efficiency: float = 0.8
    """Share of the peak that large matmuls reach: 0.80 on an H100 SXM, 0.86 on an A100 SXM (mag-/gpu_benchmark)."""
    bandwidth_efficiency: float = 0.85
    """Share of the bandwidth that elementwise kernels reach; an assumption, replaced by measuring."""
    link_bytes_per_second: float = 0.0
    """Bytes per second to the host's memory and, at the same time, back; 0 where that is the device's own memory."""
    link_efficiency: float = 0.7
    """Share of it that copies from and to pinned memory reach while both directions are busy: a cautious assumption,
    since one direction alone reaches 0.8 to 0.85."""
    least_moved_bytes: int = 2**20
    """Smaller values are not offloaded: the CPU would take longer to start their copies than the link to make them."""
    cached_bytes: int = 0
    """Ops that move no more bytes find their inputs in the device's cache, left there by the op before."""
    cached_bytes_per_second: float = 0.0
    """The rate of those ops."""
    between_seconds: float = 0.0
    """Seconds between two kernels in which nothing computes: Python, views, frees. Launches then add too. 0 on a GPU,
    where both overlap with the kernel before."""
    major: int = 9
    """Major version of the card's compute capability, by which cuBLAS chooses its workspace."""
    multiprocessors: int = LARGE.multiprocessors
    threads_per_multiprocessor: int = LARGE.threads
    context_bytes: int = 512 * 1024**2
    """Bytes that a process holds on a GPU beside torch's allocator: the context, and libraries' kernels, loaded when
    they are called. Reported are 256 MB for the bare one (RTX 3090, torch 2.7: invoke-ai/InvokeAI#9413) and 300 to 400
    MB in use (pytorch/pytorch#107667, #109888); more is assumed until it is measured."""
    host_bytes: int | None = None
    """Room on the host for offloaded values; None for twice the device's memory."""
    device_type: str = "cuda"
    """The type of torch device that it is, which says what else holds of it (`memopt.device.devices.device_of`)."""

    @property
    def link(self) -> Link:
        """The link to the host's memory, as the solver takes it."""
        room = _HOST_SHARE * self.memory_bytes if self.host_bytes is None else self.host_bytes
        return Link(self.link_bytes_per_second * self.link_efficiency, _COPY_SECONDS, room)

    @property
    def chip(self) -> Chip:
        """What the workspaces of its kernels depend on."""
        return Chip(self.multiprocessors, self.threads_per_multiprocessor)

    def multiplies(self, tile: str) -> bool:
        """Whether the device has units for 8-bit products with a scale for each tile (see `passes.ops.fp8_formats`)."""
        return scaled_rate(tile) in self.flops

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s for a dtype; one that the device has no units for runs at float32's rate."""
        return self.flops.get(dtype, self.flops["float32"])


def scaled_rate(tile: str) -> str:
    """The name in `Hardware.flops` for 8-bit products whose first operand has a scale for each tile along the dimension
    that is summed over; "" is one scale for the whole operand."""
    return f"float8_e4m3fn {tile}".rstrip()


def physical_bytes() -> int:
    """This machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""`Hardware`, the rates by which seconds are estimated, and its entries for CUDA cards, from makers' data sheets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from memopt.solver import Link

# Seconds to start a copy and to wait for it, beside those for its bytes; an assumption.
_COPY_SECONDS = 20e-6
# Room for offloaded activations on the host of a card that is not here, as a multiple of the card's memory.
_HOST_SHARE = 2


@dataclass(frozen=True)
class Chip:
    """The multiprocessors of a card. A kernel's grid of thread blocks depends on them, and so do the bytes of the
    buffers that thread blocks share."""

    multiprocessors: int
    threads: int
    """Threads that one multiprocessor runs at once."""


LARGE = Chip(132, 2048)
"""The H100's, also assumed for cards that are not known."""


@dataclass(frozen=True)
class Hardware:
    """A device's memory and the rates that times are estimated with; a measured one has efficiencies of 1."""

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
    """Share of `link_bytes_per_second` that copies from and to pinned memory reach while both directions are busy: a
    cautious assumption, since one direction alone reaches 0.8 to 0.85."""
    least_moved_bytes: int = 2**20
    """Smaller values are not offloaded: the CPU would take longer to start their copies than the link to make them."""
    cached_bytes: int = 0
    """An operator that reads and writes at most these bytes finds its inputs in the device's cache."""
    cached_bytes_per_second: float = 0.0
    """The rate at which such operators read and write."""
    between_seconds: float = 0.0
    """Seconds between two kernels in which nothing computes: Python, views, frees. Where they are not 0, a kernel's
    launch adds to its time as well. 0 on a GPU, where both overlap with the kernel before."""
    major: int = 9
    """Major version of the card's compute capability, by which cuBLAS chooses its workspace."""
    chip: Chip = LARGE
    """Its multiprocessors and their threads, by which kernels choose how much workspace they take."""
    context_bytes: int = 512 * 1024**2
    """Bytes that a process holds on a GPU beside torch's allocator: the context, and libraries' kernels, loaded when
    they are called. Users report 256 MB before any is called (RTX 3090, torch 2.7: invoke-ai/InvokeAI#9413) and 300 to
    400 MB in use (pytorch/pytorch#107667, #109888); more is assumed until it is measured. See `assumed_context`."""
    host_bytes: int | None = None
    """Room on the host for offloaded values; None for twice the device's memory."""
    device_type: str = "cuda"
    """The type of torch device that the entry is for, by which `memopt.device.devices.device_of` finds its kind."""

    @property
    def link(self) -> Link:
        """The link to the host's memory, as the solver takes it; its bandwidth is 0 for a device without one."""
        room = _HOST_SHARE * self.memory_bytes if self.host_bytes is None else self.host_bytes
        return Link(self.link_bytes_per_second * self.link_efficiency, _COPY_SECONDS, room)

    def multiplies(self, tile: str) -> bool:
        """Whether the device has units for 8-bit products with a scale for each `tile`, a name like "1x128"."""
        return scaled_rate(tile) in self.flops

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s in a dtype, given by its name ("bfloat16"); float32's where the device has no units for the dtype."""
        return self.flops.get(dtype, self.flops["float32"])


def assumed_context(major: int) -> int:
    """Bytes assumed for a CUDA context that is not measured, by the major version of the compute capability. On an H100
    it had 619 MB at first, and 769 MB while ConvNeXt-B and ResNet-50 trained (torch 2.11 for CUDA 13, driver 580)."""
    return 770 * 1024**2 if major >= 9 else Hardware.context_bytes


def scaled_rate(tile: str) -> str:
    """The key in `Hardware.flops` for 8-bit products whose first operand has a scale for each `tile` ("1x128") along
    the dimension that is summed over; with "" it has one scale for the whole operand."""
    return f"float8_e4m3fn {tile}".rstrip()


def physical_bytes() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


GIB = 1024**3

# Bytes per second of 16 lanes of PCIe, in each direction, by generation: 8, 16 and 32 GT/s with 128b/130b coding.
PCIE = {3: 15.75e9, 4: 31.5e9, 5: 63e9}


def _gpu(
    name: str, terabytes_per_second: float, gib: int, pcie: int, major: int, chip: Chip, source: str, **teraflops: float
) -> Hardware:
    return Hardware(
        name,
        {dtype: 1e12 * value for dtype, value in teraflops.items()},
        1e12 * terabytes_per_second,
        5e-6,  # an eager op costs the host about 5 µs to dispatch and launch, whatever the GPU
        gib * GIB,
        source,
        link_bytes_per_second=PCIE[pcie],
        major=major,
        chip=chip,
        context_bytes=assumed_context(major),
    )


_A100 = {"float64": 9.7, "float32": 19.5, "tfloat32": 156.0, "float16": 312.0, "bfloat16": 312.0}
_HOPPER = {
    "float64": 34.0, "float32": 67.0, "tfloat32": 494.5, "float16": 989.5, "bfloat16": 989.5,
    scaled_rate(""): 1979.0, scaled_rate("1x128"): 1979.0,
}  # fmt: skip
_B200 = {
    "float64": 40.0, "float32": 80.0, "tfloat32": 1100.0, "float16": 2250.0, "bfloat16": 2250.0,
    scaled_rate(""): 4500.0, scaled_rate("1x32"): 4500.0,
}  # fmt: skip
_GPUS = {
    r"(NVIDIA )?A100.*40GB.*": _gpu(
        "a100-40", 1.555, 40, 4, 8, Chip(108, 2048),
        "NVIDIA A100 datasheet, 40 GB SXM: 312 TFLOPS BF16, 1,555 GB/s", **_A100,
    ),
    r"(NVIDIA )?A100.*80GB.*": _gpu(
        "a100-80", 2.039, 80, 4, 8, Chip(108, 2048),
        "NVIDIA A100 datasheet, 80 GB SXM: 312 TFLOPS BF16, 2,039 GB/s", **_A100,
    ),
    "NVIDIA H100 80GB HBM3": _gpu(
        "h100", 3.35, 80, 5, 9, Chip(132, 2048),
        "H100 SXM datasheet: 1,979 TFLOPS BF16 sparse, half dense, 3.35 TB/s", **_HOPPER,
    ),
    "NVIDIA H200": _gpu(
        "h200", 4.8, 141, 5, 9, Chip(132, 2048),
        "H200 SXM datasheet: 1,979 TFLOPS BF16 sparse, half dense, 4.8 TB/s", **_HOPPER,
    ),
    "NVIDIA B200": _gpu(
        "b200", 8.0, 180, 5, 10, Chip(148, 2048),
        "NVIDIA Blackwell brief, HGX B200: 2,250 TFLOPS BF16 dense, 8 TB/s", **_B200,
    ),
    "NVIDIA L4": _gpu(
        "l4", 0.3, 24, 4, 8, Chip(58, 1536), "NVIDIA L4 datasheet: 242 TFLOPS BF16 sparse, half dense, 300 GB/s",
        float32=30.3, tfloat32=60.0, float16=121.0, bfloat16=121.0, float8_e4m3fn=242.5,
    ),
    r"(NVIDIA )?Tesla T4": _gpu(
        "t4", 0.32, 16, 3, 7, Chip(40, 1024),
        "NVIDIA T4 datasheet: 65 TFLOPS FP16, 320 GB/s, no BF16", float32=8.1, float16=65.0,
    ),
    "NVIDIA GeForce RTX 3060": _gpu(
        "rtx-3060", 0.36, 12, 4, 8, Chip(28, 1536),
        "NVIDIA RTX 3060 specifications: 28 SMs at 1.777 GHz, 360 GB/s; 256 FP16 FMA a clock and SM with FP32 "
        "accumulation, GA102 whitepaper",
        float32=12.7, tfloat32=12.7, float16=25.5, bfloat16=25.5,
    ),
    "NVIDIA GeForce RTX 3090": _gpu(
        "rtx-3090", 0.936, 24, 4, 8, Chip(82, 1536),
        "NVIDIA GA102 whitepaper, RTX 3090: 71 TFLOPS FP16 with FP32 accumulation, 936 GB/s",
        float32=35.6, tfloat32=35.6, float16=71.0, bfloat16=71.0,
    ),
    "NVIDIA GeForce RTX 4090": _gpu(
        "rtx-4090", 1.008, 24, 4, 8, Chip(128, 1536),
        "NVIDIA Ada whitepaper, RTX 4090: 165.2 TFLOPS FP16 with FP32 accumulation, 1,008 GB/s",
        float32=82.6, tfloat32=82.6, float16=165.2, bfloat16=165.2, float8_e4m3fn=330.3,
    ),
    "NVIDIA GeForce RTX 5090": _gpu(
        "rtx-5090", 1.792, 32, 5, 12, Chip(170, 1536),
        "NVIDIA RTX Blackwell whitepaper, RTX 5090: 209.5 TFLOPS FP16 with FP32 accumulation, 1,792 GB/s",
        float32=104.8, tfloat32=104.8, float16=209.5, bfloat16=209.5, float8_e4m3fn=419.0,
        **{scaled_rate("1x32"): 419.0},
    ),
}  # fmt: skip
"""The cards by their full names, as patterns for `torch.cuda.get_device_name`: an "L40", a "3060 Ti", a "4090 Laptop
GPU" are other chips."""
CARDS = {entry.name: entry for entry in _GPUS.values()}


def card_reported(name: str) -> Hardware | None:
    """The entry of the card that `torch.cuda.get_device_name` calls `name`; None for a card that is not listed."""
    return next((card for pattern, card in _GPUS.items() if re.fullmatch(pattern, name)), None)


def reported_chip(device: torch.device) -> Chip:
    """The multiprocessors of a GPU, as it reports them."""
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.max_threads_per_multi_processor)

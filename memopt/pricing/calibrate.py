"""Measures what a device really does, for where the table's data sheets are too far off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.pricing.hardware_table import Hardware, hardware

# Part of what copies reach by themselves that is counted on while compute uses the device's memory too.
_LINK_SHARE = 0.9


def measure_hardware(
    device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> Hardware:
    """Time a large matmul for each dtype, a large copy and a small op, in about a second; return the rates found.

    On a GPU also copies to the host and back, both at once.
    """
    on_cuda = device.type == "cuda"
    size = 4096 if on_cuda else 512
    large = torch.ones(2**27 if on_cuda else 2**24, device=device)
    target = torch.empty_like(large)
    small = torch.ones(1, device=device)
    flops: dict[str, float] = {}
    for dtype in dtypes:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds = _seconds(lambda matrix=matrix: torch.mm(matrix, matrix), device)  # type: ignore[misc]
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    name = torch.cuda.get_device_name(device) if on_cuda else "cpu"
    total = torch.cuda.get_device_properties(device).total_memory if on_cuda else hardware("cpu").memory_bytes
    return Hardware(
        name=name,
        flops=flops,
        bytes_per_second=2 * large.nbytes / _seconds(lambda: target.copy_(large), device),
        launch_seconds=_seconds(lambda: torch.add(small, 1), device, repeats=100),
        memory_bytes=total,
        source=f"measured on {name} with torch {torch.__version__}",
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        link_bytes_per_second=_link_rate(device) if on_cuda else 0.0,
        link_efficiency=_LINK_SHARE,
        least_moved_bytes=2**20 if on_cuda else 4096,
        host_bytes=hardware("cpu").memory_bytes // 2,
    )


def _link_rate(device: torch.device, nbytes: int = 2**27) -> float:
    """Bytes per second of each direction between a GPU and pinned memory of the host while both are busy."""
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    values = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    stream: Any = torch.cuda.Stream
    streams = [stream(device) for _ in range(2)]

    def there_and_back() -> None:
        with torch.cuda.stream(streams[0]):
            hosts[0].copy_(values[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            values[1].copy_(hosts[1], non_blocking=True)

    return nbytes / _seconds(there_and_back, device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Seconds of one run, the best of three rounds after one to warm up."""
    best = float("inf")
    for _ in range(4):
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        _wait(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

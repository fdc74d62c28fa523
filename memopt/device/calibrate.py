"""Measures the rates of a device, where those of its data sheet are too far off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from memopt.device.devices import device_of
from memopt.device.hardware import Hardware, scaled_rate
from passes.ops.fp8_formats import E4M3, quantize
from passes.ops.fp8_kernels import Operand, kernel_for
from passes.ops.fp8_ops import SCALINGS

# Share of the rate of copies alone that is assumed while compute uses the device's memory too.
_LINK_SHARE = 0.9


def measure_hardware(
    device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> Hardware:
    """Time a large matmul for each dtype, copies and a small op, in about a second, and return the rates found.

    On a GPU, copies to the host and back, both at once, are timed too.
    """
    kind = device_of(device)
    size = 512 if kind.is_host else 4096
    large = torch.ones(2**24 if kind.is_host else 2**27, device=device)
    target = torch.empty_like(large)
    small = torch.ones(1, device=device)
    flops: dict[str, float] = {}
    for dtype in dtypes:
        matrix = torch.ones(size, size, device=device, dtype=dtype)
        seconds = _seconds(lambda matrix=matrix: torch.mm(matrix, matrix), device)  # type: ignore[misc]
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    flops |= _scaled_rates(size, device)
    bytes_per_second = _copy_rate(target, large, device)
    cached_bytes, cached_rate = _cache(target, large, bytes_per_second, device)
    reported = kind.reported(device)
    return replace(
        reported,
        flops=flops,
        bytes_per_second=bytes_per_second,
        launch_seconds=_seconds(lambda: torch.add(small, 1), device, repeats=100),
        source=f"measured on {reported.name} with torch {torch.__version__}",
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        link_bytes_per_second=_link_rate(device),
        link_efficiency=_LINK_SHARE,
        cached_bytes=cached_bytes,
        cached_bytes_per_second=cached_rate,
        between_seconds=_between_kernels(small) if kind.is_host else 0.0,
    )


def _scaled_rates(size: int, device: torch.device) -> dict[str, float]:
    """FLOP/s of 8-bit products, for each kind of scale that the device has kernels for."""
    found: dict[str, float] = {}
    ones = torch.ones(size, size, device=device)
    for tiles in dict.fromkeys(scaling.product for scaling in SCALINGS.values()):
        a, b = (Operand(*quantize(ones, E4M3, tile), tile) for tile in tiles)
        kernel = kernel_for(a, b, torch.bfloat16)
        if kernel is not None:
            seconds = _seconds(partial(kernel, a, b, torch.bfloat16), device)
            found[scaled_rate(a.tile)] = 2 * size**3 / seconds
    return found


def _copy_rate(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Bytes per second that a copy reads and writes."""
    repeats = max(3, 2**20 // source.nbytes)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, repeats)


def _cache(target: torch.Tensor, source: torch.Tensor, rate: float, device: torch.device) -> tuple[int, float]:
    """The bytes, read and written, up to which copies are 1.5 times as fast as large ones, and their bytes per second.

    A quarter of the size is left for other contents of the cache. (0, 0.0) where no size is that fast.
    """
    for power in range(26, 15, -1):
        numbers = 2**power // 2 // source.element_size()
        here = _copy_rate(target[:numbers], source[:numbers], device) if numbers <= source.numel() else 0.0
        if here > 1.5 * rate:
            return 2**power * 3 // 4, here
    return 0, 0.0


def _between_kernels(small: torch.Tensor, kernels: int = 50) -> float:
    """Seconds per kernel of a graph of small kernels, with two views between each as in training graphs, less the
    seconds of the kernel itself."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(kernels):
        column = graph.call_function(torch.ops.aten.view.default, (value, [1, 1]))
        row = graph.call_function(torch.ops.aten.t.default, (column,))
        value = graph.call_function(torch.ops.aten.add.Tensor, (row, 1.0))
    graph.output(value)
    module = fx.GraphModule({}, graph)
    start = small.view(1, 1)
    together = _seconds(lambda: module(start), small.device, repeats=5) / kernels
    return max(1e-9, together - _seconds(lambda: torch.ops.aten.add.Tensor(start, 1.0), small.device, repeats=100))


def _link_rate(device: torch.device, nbytes: int = 2**27) -> float:
    """Bytes per second, in each direction, between a GPU and pinned host memory while both directions are busy; 0
    without a link."""
    there_and_back = device_of(device).there_and_back(device, nbytes)
    return 0.0 if there_and_back is None else nbytes / _seconds(there_and_back, device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """Seconds of one run, the best of five rounds after one to warm up."""
    best = float("inf")
    for _ in range(6):
        device_of(device).synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        device_of(device).synchronize(device)
        best = min(best, (time.perf_counter() - start) / repeats)
    return best

"""Measurements of a device, kept on disk: its rates, its context, and the seconds of operators timed on it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from memopt.device.devices import device_of
from memopt.device.hardware import Hardware, scaled_rate
from memopt.device.op_call import OpCall
from memopt.device.op_times import call_key, dominant_calls, time_calls
from memopt.disk_cache import as_json, cache_folder, opened, read_json, sealed, value_from, warn_not_kept, write_json
from passes.ops.fp8_formats import E4M3, quantize
from passes.ops.fp8_kernels import Operand, kernel_for
from passes.ops.fp8_ops import SCALINGS

# Share of the rate of copies alone that is assumed while compute uses the device's memory too.
_LINK_SHARE, _LINK_BYTES = 0.9, 2**27


def measure_hardware(
    device: torch.device, dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> Hardware:
    """Time a large matmul for each dtype, copies (on a GPU also to the host and back, both at once) and a one-element
    op, in about a second; returns the rates found."""
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
    reported, there_and_back = kind.reported(device), kind.there_and_back(device, _LINK_BYTES)
    return replace(
        reported,
        flops=flops,
        bytes_per_second=bytes_per_second,
        launch_seconds=_seconds(lambda: torch.add(small, 1), device, repeats=100),
        source=f"measured on {reported.name} with torch {torch.__version__}",
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        link_bytes_per_second=0.0 if there_and_back is None else _LINK_BYTES / _seconds(there_and_back, device),
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
    """The bytes, read and written together, up to which copies are at least 1.5 times as fast as large ones (`rate`),
    less a quarter for other contents of the cache, and the rate of such copies; (0, 0.0) for no size."""
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


FORMAT = 6
"""Files of another format are ignored. To be raised by one when what is measured, or how, changes."""
MOST_CALLS = 2**14
"""The most operator calls whose seconds a device's file keeps; the latest ones stay."""


def calibrated_hardware(device: torch.device) -> Hardware:
    """The `Hardware` of `device`, measured on this machine, now or before with the same card, driver and torch version.

    On a GPU it includes the bytes that a process holds outside of torch's allocator (CUDA context, libraries). The
    first call takes a second or two."""
    known = _read(device)
    if known is None:
        measured = measure_hardware(device)
        context = device_of(device).measure_context_bytes(device)
        if context is not None:
            measured = replace(measured, context_bytes=context)
        known = _Measured(measured)
        _write(device, known)
    return known.hardware


def calibrated_seconds(expected: Mapping[OpCall, float], device: torch.device) -> dict[OpCall, float]:
    """Seconds of one run of each call among those that take most of a step, as timed on this machine, now or before,
    but for calls that cannot be timed (see `time_calls`). `expected` has the seconds that all runs of a call in a step
    together are expected to take."""
    known = _read(device) or _Measured(calibrated_hardware(device))
    seconds = dict(known.seconds)
    wanted = dominant_calls(expected)
    fresh = {call: expected[call] for call in wanted if call_key(call) not in seconds}
    if fresh:
        found = {call_key(call): value for call, value in time_calls(fresh, device).items()}
        seconds |= found
        if found:
            _write(device, replace(known, seconds=dict(list(seconds.items())[-MOST_CALLS:])))
    return {call: seconds[call_key(call)] for call in wanted if call_key(call) in seconds}


def card_key(device: torch.device) -> dict[str, Any]:
    """The properties that measurements depend on: card, driver and torch; on the CPU the number of threads."""
    return {"format": FORMAT, "torch": torch.__version__, **device_of(device).identity(device)}


def _path(device: torch.device) -> Path:
    digest = hashlib.sha256(repr(sorted(card_key(device).items())).encode()).hexdigest()[:16]
    return cache_folder() / "cards" / f"{digest}.json"


@dataclass(frozen=True)
class _Measured:
    """The measurements of a device."""

    hardware: Hardware
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of one run of a call, by `call_key`."""


def _read(device: torch.device) -> _Measured | None:
    """The measurements in the device's file; None where there is none, or it is damaged or of another device or
    format."""
    try:
        values = opened(read_json(_path(device)))
        if values.pop("key", None) != card_key(device):
            return None
        known = value_from(_Measured, values)
    except (OSError, ValueError, RecursionError):
        return None
    hardware = known.hardware
    rates = (hardware.bytes_per_second, *hardware.flops.values(), *known.seconds.values())
    return known if all(rate > 0 for rate in rates) else None


def _write(device: torch.device, known: _Measured) -> None:
    """Replace the device's file; warn where it cannot be written."""
    try:
        write_json(_path(device), sealed({"key": card_key(device), **as_json(known)}))
    except OSError as error:
        warn_not_kept("measurements of the device", str(error))

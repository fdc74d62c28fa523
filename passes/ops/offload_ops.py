"""The operators that offload values to the host: `memopt::copy_out`, `await_out`, `copy_back`, `await_back`.

Copies run on streams of their own, one for each direction, beside compute. Compute waits for a copy out before it gives
the value's memory back, and for a copy back before it reads it, so that memory is free exactly when the graph lets go
of it. On the CPU copies are done at once. What is copied is the value's stretch of memory as it lies, bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.ops.host_memory import HostMemory


@functools.cache
def host_memory(device_type: str) -> HostMemory:
    """Returns the pool for the devices of one type; pinned for CUDA. There is one for each type of device."""
    return HostMemory(pinned=device_type == "cuda")


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Returns the streams of the copies out and of the copies back."""
    stream: Any = torch.cuda.Stream
    return stream(device), stream(device)


def _copy_out(value: Tensor) -> Tensor:
    span = _span(value)
    leased, block = host_memory(value.device.type).lease(span * value.element_size())
    flat = leased.view(value.dtype)
    source = value.as_strided((span,), (1,), value.storage_offset())
    if value.device.type == "cuda":
        out, _ = _streams(value.device)
        out.wait_stream(torch.cuda.current_stream(value.device))
        if block.done is not None:
            out.wait_event(block.done)  # the block's last copy back, of a step before
        with torch.cuda.stream(out):
            flat.copy_(source, non_blocking=True)
            block.done = out.record_event()
    else:
        flat.copy_(source)
    return flat.as_strided(value.shape, value.stride())


def _await_out(host: Tensor, value: Tensor) -> Tensor:
    if value.device.type == "cuda":
        block = host_memory("cuda").block(host)
        torch.cuda.current_stream(value.device).wait_event(block.done)
    return torch.ops.aten.alias.default(host)


def _copy_back(host: Tensor, device: torch.device) -> Tensor:
    block = host_memory(device.type).block(host)
    span = _span(host)
    source = host.as_strided((span,), (1,))
    flat = torch.empty(span, dtype=host.dtype, device=device)
    if device.type == "cuda":
        _, back = _streams(flat.device)
        block.home = torch.cuda.current_stream(flat.device)
        back.wait_stream(block.home)  # what was in this memory before may still be read
        back.wait_event(block.done)
        with torch.cuda.stream(back):
            flat.copy_(source, non_blocking=True)
            block.done = back.record_event()
        block.arriving = flat
    else:
        flat.copy_(source)
    return flat.as_strided(host.shape, host.stride())


def _await_back(value: Tensor, host: Tensor) -> Tensor:
    if value.device.type == "cuda":
        block = host_memory("cuda").block(host)
        torch.cuda.current_stream(value.device).wait_event(block.done)
        block.arriving = None
    return torch.ops.aten.alias.default(value)


def _fake_copy_out(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _fake_copy_back(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)


def _fake_await(first: Tensor, _: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(first)


def _span(value: Tensor) -> int:
    """Returns the number of elements from a tensor's first to its last in memory."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _operator(schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """Defines an operator of the namespace `memopt`, and returns it."""
    name = schema.partition("(")[0]
    torch.library.define(f"memopt::{name}", schema.removeprefix(name), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"memopt::{name}", "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(f"memopt::{name}", fake)
    return getattr(torch.ops.memopt, name).default


COPY_OUT: Any = _operator("copy_out(Tensor value) -> Tensor", _copy_out, _fake_copy_out)
"""Starts to copy a value to the host's memory; the result lies there and is laid out as the value is."""
AWAIT_OUT: Any = _operator("await_out(Tensor(a) host, Tensor value) -> Tensor(a)", _await_out, _fake_await)
"""Compute waits until the copy out is done: the value may die behind this call. Returns `host`."""
COPY_BACK: Any = _operator("copy_back(Tensor host, Device device) -> Tensor", _copy_back, _fake_copy_back)
"""Starts to copy a value back into new memory, which nothing may read yet."""
AWAIT_BACK: Any = _operator("await_back(Tensor(a) value, Tensor host) -> Tensor(a)", _await_back, _fake_await)
"""Compute waits until the copy back is done. Returns `value`, which can be read from here on."""

TRANSFERS = frozenset({COPY_OUT, AWAIT_OUT, COPY_BACK, AWAIT_BACK})
"""The four operators of offloading."""

"""The operators that offload values to the host: `memopt::copy_out`, `await_out`, `copy_back`, `await_back`.

Copies run on streams of their own, one for each direction, beside compute. Compute waits for a copy out before it gives
the value's memory back, and for a copy back before it reads it, so that memory is free exactly when the graph lets go
of it. On the CPU copies are done at once. A value's bytes are copied unchanged, from its first element to its last.
"""

from __future__ import annotations

import functools
import mmap
import threading
import warnings
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from passes.compat import define_operator

# A free block is leased for a value of at least this share of its size, so that other shapes can reuse it.
_LEAST_USED = 0.8


class _Block:
    """Whole pages of host memory; page-locked if `pinned`, so that the GPU copies from and to it beside compute."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, self.nbytes)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.pinned = pinned and _pin(self.address, self.nbytes)
        self.done: Any = None
        """The event that ends the latest copy from or to the block; None on the CPU, where copies are synchronous."""
        self.arriving: Tensor | None = None
        """The tensor that is being filled from the block: its memory must not be reused before `done`."""
        self.home: Any = None
        """The compute stream that reads `arriving`."""

    def abandon_copy(self) -> None:
        """Makes the compute stream wait for a copy back that no `await_back` waited for, and forgets it."""
        if self.arriving is not None and self.home is not None:
            self.home.wait_event(self.done)
        self.arriving = self.home = None

    def unpin(self) -> None:
        """Unregisters the pages with CUDA after the last copy; they go back to the system with the last reference."""
        if self.done is not None:
            self.done.synchronize()
        if self.pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.address)


class _HostMemory:
    """A pool of blocks. A lease ends when the last tensor in the block is freed: in the backward that fetches it, or
    with an autograd graph whose backward never ran."""

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.most_leased_bytes = 0
        """The most bytes that were leased at one time; may be reset to 0."""
        self._leased: dict[int, _Block] = {}
        self._free: list[_Block] = []
        # A finalizer may run at any point of the program, so that it must not wait for the lock.
        self._returned: deque[_Block] = deque()
        self._lock = threading.Lock()

    def lease(self, nbytes: int) -> tuple[Tensor, _Block]:
        """Returns uninitialised memory as a tensor, uint8 [nbytes], and the block that it lies in."""
        with self._lock:
            self._collect()
            fitting = [block for block in self._free if nbytes <= block.nbytes <= max(nbytes, 1) / _LEAST_USED]
            block = min(fitting, key=lambda candidate: candidate.nbytes, default=None)
            if block is None:
                block = _Block(max(nbytes, 1), pinned=self.pinned)
            else:
                self._free.remove(block)
            self._leased[block.address] = block
            self.most_leased_bytes = max(self.most_leased_bytes, sum(leased.nbytes for leased in self._leased.values()))
            while sum(block.nbytes for block in self._free) > self.most_leased_bytes:
                self._free.pop(0).unpin()
        held = memoryview(block.memory)
        ending = weakref.finalize(held, self._returned.append, block)
        ending.atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)[:nbytes], block

    def block(self, host: Tensor) -> _Block:
        """Returns the block that a leased tensor lies in. Raises RuntimeError for a tensor that is not leased."""
        block = self._leased.get(host.untyped_storage().data_ptr())
        if block is None:
            raise RuntimeError(
                "a value that was offloaded did not come back as it was saved: hooks on saved tensors "
                "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu) do not go together with offload_activations; "
                "remove the hooks, or leave 'offload_activations' out of allow"
            )
        return block

    def holds(self, address: int) -> bool:
        """Returns whether a leased block begins at an address."""
        return address in self._leased

    @property
    def leased_bytes(self) -> int:
        """Bytes of the blocks in use now."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in self._leased.values())

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all blocks, leased or free."""
        with self._lock:
            self._collect()
            return sum(block.nbytes for block in [*self._leased.values(), *self._free])

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            block.abandon_copy()
            del self._leased[block.address]
            self._free.append(block)


def _pin(address: int, nbytes: int) -> bool:
    """Pins pages for all CUDA devices; returns whether that succeeded, and warns if not."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1
    failure = int(runtime.cudaHostRegister(address, nbytes, portable))
    if failure:
        warnings.warn(
            f"the host's memory cannot be pinned (cudaHostRegister: error {failure}): offloaded activations are copied "
            "through unpinned memory, during which compute waits; raise the limit of locked memory (ulimit -l)",
            stacklevel=2,
        )
    return not failure


@functools.cache
def host_memory(device_type: str) -> _HostMemory:
    """Returns the pool of host memory for copies from devices of this type; pinned for CUDA."""
    return _HostMemory(pinned=device_type == "cuda")


@functools.cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Returns the streams of the copies out and of the copies back."""
    stream: Any = torch.cuda.Stream
    return stream(device), stream(device)


def _leased(value: Tensor, device_type: str) -> tuple[Tensor, Tensor, _Block]:
    """Returns leased memory for a copy of a value, the value's elements in the order of their memory, and the block."""
    span = _span(value)
    leased, block = host_memory(device_type).lease(span * value.element_size())
    return leased.view(value.dtype), value.as_strided((span,), (1,), value.storage_offset()), block


def _copy_out(value: Tensor) -> Tensor:
    flat, source, block = _leased(value, value.device.type)
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


def lend(value: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a value in host memory, which may stay there for many steps.

    `bring` and `COPY_BACK` copy it to `device`."""
    flat, source, _ = _leased(value, device.type)
    flat.copy_(source)
    return flat.as_strided(value.shape, value.stride())


def bring(host: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device` of `host`, if `lend` or `COPY_OUT` put it on the host; any other tensor as it is."""
    if not host_memory(device.type).holds(host.untyped_storage().data_ptr()):
        return host
    return _await_back(_copy_back(host, device), host)


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
        if block.done is not None:
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


def _fake_copy(value: Tensor, device: torch.device | str = "cpu") -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _fake_await(first: Tensor, _: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(first)


def _span(value: Tensor) -> int:
    """Returns the number of elements from a tensor's first to its last in memory."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


COPY_OUT: Any = define_operator("copy_out(Tensor value) -> Tensor", _copy_out, _fake_copy)
"""Starts to copy a value to the host's memory; the result lies there and is laid out as the value is."""
AWAIT_OUT: Any = define_operator("await_out(Tensor(a) host, Tensor value) -> Tensor(a)", _await_out, _fake_await)
"""Compute waits until the copy out is done; the value may be freed after this call. Returns `host`."""
COPY_BACK: Any = define_operator("copy_back(Tensor host, Device device) -> Tensor", _copy_back, _fake_copy)
"""Starts to copy a value back into new memory, which nothing may read yet."""
AWAIT_BACK: Any = define_operator("await_back(Tensor(a) value, Tensor host) -> Tensor(a)", _await_back, _fake_await)
"""Compute waits until the copy back is done. Returns `value`, which can be read from here on."""

TRANSFERS = frozenset({COPY_OUT, AWAIT_OUT, COPY_BACK, AWAIT_BACK})
"""The four operators of offloading."""

"""Measures the peak memory of a block of code with one meter for CPU and CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from memopt.compat.fakes import FakeTensor
from memopt.compat.host import HOST, MemoryEvents
from memopt.compat.operators import plain_tensors
from memopt.compat.tensors import bytes_by_address, is_wrapper, special_kind
from memopt.device.devices import DEVICES, device_in_use, device_of
from memopt.errors import GIB
from memopt.live_objects import live_objects
from passes.ops.offload_ops import host_memory


class PeakMeter:
    """The context manager that `measure_peak` returns. Its figures can be read after the block has ended.

    Reading them earlier raises `RuntimeError`. If the block raised an exception, they cover the time until then.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._defaulted = device is None
        self.device = _meter_device(device)
        self._allocated: int | None = None
        self._resident = 0
        self._blocks = 0
        self._now = 0
        self._events: MemoryEvents | None = None
        self._thread = threading.get_ident()

    @property
    def bytes(self) -> int:
        """The most bytes held on the device at any moment of the block: `resident_bytes + allocated_bytes`."""
        return self._resident + self.allocated_bytes

    @property
    def gb(self) -> float:
        """`bytes` in GB of 1024³."""
        return self.bytes / GIB

    @property
    def resident_bytes(self) -> int:
        """Bytes that were allocated when the block was entered."""
        return self.bytes - self.allocated_bytes

    @property
    def allocated_bytes(self) -> int:
        """The most bytes that the block held at once beyond `resident_bytes`, at least 0."""
        if self._allocated is None:
            raise RuntimeError("the peak is known once the `with memopt.measure_peak()` block has ended")
        return self._allocated

    listeners: ClassVar[list[Callable[[Sequence[int]], None]]] = []
    """Functions that are called when the block of a meter of the CPU ends, with its events in order: bytes allocated,
    or minus the bytes freed."""
    _running: ClassVar[list[PeakMeter]] = []
    """The meters of the CPU that are active now."""

    @classmethod
    def running(cls) -> PeakMeter | None:
        """The meter of the CPU whose block runs in this thread; None if there is none."""
        thread = threading.get_ident()
        return next((meter for meter in reversed(cls._running) if meter._thread == thread), None)

    def held_bytes(self) -> int:
        """The bytes that are allocated now, for a meter of the CPU inside its block; in a backward, and where torch has
        only kineto's profiler, those of the previous call, or of the entry of the block."""
        assert self._events is not None
        self._now += sum(self._events.since_last() or ())
        return self._now

    def __enter__(self) -> PeakMeter:
        if self._events is not None or self._allocated is not None:
            raise RuntimeError("this meter has been used: measure_peak() makes a new one for each block")
        kind = device_of(self.device)
        if kind.caching:
            with _lock:
                if self.device in _counted:
                    raise RuntimeError(
                        f"memory cannot be metered here: another memopt meter is active on {self.device}; end its "
                        "block first"
                    )
                _counted.add(self.device)
            self._resident = kind.allocated_bytes(self.device)
            kind.reset_peak(self.device)
            return self
        events, self._thread = MemoryEvents(), threading.get_ident()
        blocks = start_with_resident(events)
        self._events = events
        events.since_last()
        self._resident, self._blocks = sum(blocks.values()), len(blocks)
        self._now = self._resident
        self._running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._running.remove(self)
            inside = self._events.stop()[self._blocks :]
            for listener in tuple(self.listeners):
                listener(inside)
            self._allocated = max(0, max(accumulate(inside), default=0))
            self._events = None
            used = device_in_use()
            if not self._defaulted or used == HOST:
                return
            # The card was first used inside the block: nothing was allocated before, so its own peak is the block's.
            self.device, self._resident = used, 0
        else:
            _counted.discard(self.device)
        self._allocated = max(0, device_of(self.device).peak_bytes(self.device) - self._resident)

    def __repr__(self) -> str:
        if self._allocated is None:
            return f"PeakMeter(device={str(self.device)!r}, running)"
        return f"PeakMeter(device={str(self.device)!r}, bytes={self.bytes}, resident_bytes={self._resident})"


def measure_peak(device: torch.device | str | int | None = None) -> PeakMeter:
    """Measures the peak memory that a device holds during a block.

    ::

        with memopt.measure_peak() as peak:
            loss = model(batch).loss
            loss.backward()
        print(peak.gb)

    On CUDA, the figures are the allocator's own statistics; its peak is reset at entry. On the CPU, torch's profiler
    records every allocation and free of torch's allocator, also in kernels and compiled code. The storages that are
    allocated at entry are found among Python's objects. The CPU's figures therefore lack memory that only C++ holds at
    entry, such as activations saved by an earlier forward, and allocations by other Python threads.

    Args:
        device: a CPU or CUDA device. By default the current CUDA device if CUDA is in use in this process by the end
            of the block (`torch.cuda.is_initialized()`), else the CPU.

    Raises:
        ValueError: for a device that is neither CPU nor CUDA.
        RuntimeError: at entry, if a profiler is active in this thread (CPU) or another meter on this device (CUDA).
    """
    return PeakMeter(device)


def resident_cpu_blocks() -> dict[int, int]:
    """The CPU memory that Python's tensors hold, as bytes by address of a block, each once for all of its views. Fake
    and meta tensors hold none."""
    return blocks_of(live_objects(torch.Tensor), HOST)


def start_with_resident(events: MemoryEvents) -> dict[int, int]:
    """Start to record events, first of the CPU memory blocks that Python's tensors hold; returns these blocks."""
    blocks = resident_cpu_blocks()
    events.start()
    for address, nbytes in blocks.items():
        events.declare(address, nbytes)
    return blocks


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[int, int]:
    """The memory blocks on a device that tensors and their gradients hold, as bytes by address, each once for all of
    its views. Fake and meta tensors hold none."""
    blocks: dict[int, int] = {}
    with plain_tensors(), torch.no_grad():
        for _, address, nbytes in _blocks(tensors, device):
            blocks[address] = max(blocks.get(address, 0), nbytes)
    return blocks


def largest_at(
    addresses: Collection[int], tensors: Iterable[torch.Tensor], device: torch.device
) -> dict[int, torch.Tensor]:
    """The largest tensor in each memory block at one of `addresses`, among `tensors` and their gradients on the device;
    a sparse or nested one only where no other lies in the block."""
    found: dict[int, tuple[int, torch.Tensor]] = {}
    with plain_tensors(), torch.no_grad():
        for tensor, address, _ in _blocks(tensors, device) if addresses else ():
            nbytes = 0 if special_kind(tensor) else tensor.nbytes
            if address in addresses and (address not in found or nbytes > found[address][0]):
                found[address] = nbytes, tensor
    return {address: tensor for address, (_, tensor) in found.items()}


def _blocks(tensors: Iterable[torch.Tensor], device: torch.device) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Each tensor or gradient with the address and bytes of each of its blocks that is on the device. The tensors
    inside a wrapper are found by themselves."""
    offloaded = host_memory(HOST.type).holds if device.type == HOST.type else None
    for tensor in tensors:
        if type(tensor) is FakeTensor:
            continue
        try:  # a gradient from the backward pass has no Python object until its `.grad` is read
            gradient = tensor.grad if tensor.is_leaf else None
        except RuntimeError:  # a view from a `no_grad` block whose base was written to with gradients has none
            gradient = None
        for one in (tensor, gradient):
            if one is None or is_wrapper(one):
                continue
            for address, nbytes in bytes_by_address((one,), device).items():
                # Storages made by numpy or in shared memory may alias one block; what is offloaded lies on no device.
                if address and nbytes and not (offloaded and offloaded(address)):
                    yield one, address, nbytes


_counted: set[torch.device] = set()
"""The devices whose allocator's statistics a meter reads now. A second meter on a device would reset those of the
first."""
_lock = threading.Lock()


def _meter_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return device_in_use()
    named = torch.device(device)
    if named.type not in DEVICES:
        raise ValueError(f"measure_peak meters {' and '.join(map(repr, DEVICES))} devices, not {str(named)!r}")
    return device_of(named).current() if named.index is None else named

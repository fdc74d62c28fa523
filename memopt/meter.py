"""Measures the peak memory of a block of code with one meter for CPU and CUDA."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from types import TracebackType

import torch

from memopt.compat.dispatch import plain_tensors
from memopt.compat.profiler import CpuMemoryEvents
from memopt.compat.storages import sparse_parts

GB = 1024**3


class PeakMeter:
    """What `measure_peak` yields; its figures can be read once the block has ended.

    Reading them earlier raises `RuntimeError`. After an exception in the block they hold what was seen up to it.
    """

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self._defaulted = device is None
        self.device = _meter_device(device)
        self._allocated: int | None = None
        self._resident = 0
        self._blocks = 0
        self._events: CpuMemoryEvents | None = None

    @property
    def bytes(self) -> int:
        """Bytes held on the device at the worst moment of the block: `resident_bytes + allocated_bytes`."""
        return self._resident + self.allocated_bytes

    @property
    def gb(self) -> float:
        """`bytes` in GB of 1024³."""
        return self.bytes / GB

    @property
    def resident_bytes(self) -> int:
        """Bytes alive when the block was entered."""
        self._check_ended()
        return self._resident

    @property
    def allocated_bytes(self) -> int:
        """Highest sum of allocations less frees inside the block, at least 0."""
        return self._check_ended()

    def __enter__(self) -> PeakMeter:
        if self._events is not None or self._allocated is not None:
            raise RuntimeError("this meter has been used: measure_peak() makes a new one for each block")
        if self.device.type == "cuda":
            _cuda_meters.enter(self.device)
            self._resident = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return self
        blocks = resident_cpu_blocks()
        events = CpuMemoryEvents()
        events.start()
        self._events = events
        for address, nbytes in blocks.items():
            events.declare(address, nbytes)
        self._resident, self._blocks = sum(blocks.values()), len(blocks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._events is not None:
            inside = islice(self._events.stop(), self._blocks, None)
            self._allocated = max(0, max(accumulate(inside), default=0))
            self._events = None
            if not (self._defaulted and _cuda_in_use()):
                return
            # CUDA came up inside the block: its peak since then is the block's, and nothing was there before.
            self.device = torch.device("cuda", torch.cuda.current_device())
            self._resident = 0
        else:
            _cuda_meters.leave(self.device)
        self._allocated = max(0, torch.cuda.max_memory_allocated(self.device) - self._resident)

    def _check_ended(self) -> int:
        if self._allocated is None:
            raise RuntimeError("the peak is known once the `with memopt.measure_peak()` block has ended")
        return self._allocated

    def __repr__(self) -> str:
        if self._allocated is None:
            return f"PeakMeter(device={str(self.device)!r}, running)"
        return f"PeakMeter(device={str(self.device)!r}, bytes={self.bytes}, resident_bytes={self._resident})"


def measure_peak(device: torch.device | str | int | None = None) -> PeakMeter:
    """Measures all that a device holds at the worst moment of a block.

    ::

        with memopt.measure_peak() as peak:
            loss = model(batch).loss
            loss.backward()
        print(peak.gb)

    On CUDA the allocator's own statistics are read (its peak statistics are reset at entry). On the CPU torch's
    profiler records each allocation and free of its allocator, in kernels and compiled code as well, and what is alive
    at entry is found by scanning Python's objects, each storage once: memory that only C++ holds at entry (activations
    saved by an autograd graph built before) is not seen, nor what Python threads other than this one allocate.

    Args:
        device: a CPU or CUDA device. By default the current CUDA device if CUDA is in use in this process by the end
            of the block (`torch.cuda.is_initialized()`), else the CPU.

    Raises:
        ValueError: for a device that is neither CPU nor CUDA.
        RuntimeError: at entry, if a profiler is active in this thread (CPU) or another meter on this device (CUDA).
    """
    return PeakMeter(device)


def resident_cpu_blocks() -> dict[int, int]:
    """Memory that Python's tensors hold on the CPU now: address to bytes, each block once however many view it.

    Fake and meta tensors hold none; tensor subclasses count by the tensors inside them.
    """
    blocks: dict[int, int] = {}
    with plain_tensors(), torch.no_grad():
        for tensor in _live_tensors():
            for storage in _storages(tensor):
                address, nbytes = _address(storage), storage.nbytes()
                if address and nbytes:  # storages made by numpy or in shared memory may alias one block
                    blocks[address] = max(blocks.get(address, 0), nbytes)
    return blocks


def _live_tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # type(), not isinstance: the latter runs `__class__` properties of lazy modules and proxies.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            # A gradient made by the backward pass may have no Python object until someone asks for it.
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _storages(tensor: torch.Tensor) -> Iterable[torch.UntypedStorage]:
    try:
        if tensor.device.type != "cpu":
            return ()
        if tensor.layout == torch.sparse_coo:
            return [part.untyped_storage() for part in sparse_parts(tensor)]
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return ()  # opaque tensors and wrapper subclasses have no storage of their own
    return (storage,) if storage.device.type == "cpu" else ()


def _address(storage: torch.UntypedStorage) -> int:
    """Where the storage's memory is; 0 where it has none, as in wrappers that a tracer left behind."""
    try:
        return storage.data_ptr()
    except RuntimeError:  # "Attempted to access the data pointer on an invalid python storage"
        return 0


class _CudaMeters:
    """The CUDA devices being metered: a second meter would reset the statistics that the first one reads."""

    def __init__(self) -> None:
        self._active: set[torch.device] = set()
        self._lock = threading.Lock()

    def enter(self, device: torch.device) -> None:
        with self._lock:
            if device in self._active:
                raise RuntimeError(f"memory cannot be metered here: another memopt meter is active on {device}")
            self._active.add(device)

    def leave(self, device: torch.device) -> None:
        with self._lock:
            self._active.discard(device)


_cuda_meters = _CudaMeters()


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _meter_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if _cuda_in_use() else torch.device("cpu")
    named = torch.device(device)
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"measure_peak meters 'cpu' and 'cuda' devices, not {str(named)!r}")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named

"""The host, torch's device "cpu": tensors in its memory, the events of its allocator, and tensors without values."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import profiler, profiler_legacy

from memopt.compat.autograd import current_backward
from passes.compat import private

# `_set_throw_on_mutable_data_ptr` makes kernels that would write to a tensor, and code that asks for its address, raise
# `RuntimeError`; `_construct_storage_from_data_pointer` makes a storage in memory that it does not own.
PRIVATE_NAMES = private("""
    torch._C._autograd: _profiler_enabled DeviceType
    libc10: _ZN3c1025profiledCPUMemoryReporterEv? _ZN3c1025ProfiledCPUMemoryReporter3NewEPvm?
    torch._C: _set_throw_on_mutable_data_ptr _construct_storage_from_data_pointer
""")

HOST = torch.device("cpu")


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the host's memory."""
    return tensor.device.type == HOST.type


def device_among(values: Iterable[Any]) -> torch.device:
    """The device on which a graph with these inputs runs: an accelerator if any tensor is on one (scalars on the host
    may accompany its tensors), else the host."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != HOST.type), HOST)


# The legacy profiler (`_enable_profiler_legacy`, `profile._start_trace`) may be missing: see below.
_SYMBOLS = "_ZN3c1025profiledCPUMemoryReporterEv", "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"
"""`c10::profiledCPUMemoryReporter` and `c10::ProfiledCPUMemoryReporter::New`, as libc10 exports them."""

# `torch._C` is the extension module: these parts have no complete stubs, hence Any.
_autograd: Any = torch._C._autograd


LEGACY_PROFILER = hasattr(_autograd, "_enable_profiler_legacy")
"""Whether torch still has the deprecated profiler from before kineto, which starts faster. Kineto records the same
events, but some builds (2.13) write two `USDT:…` lines to stderr in each session, which no log level silences."""


class MemoryEvents:
    """Records the memory that this thread allocates and frees through torch's allocator, from `start` to `stop`: in
    kernels, in compiled code, and in threads that torch starts with this thread's state (the backward pass,
    `torch.jit.fork`), not in other Python threads. For a `device_type` other than the host's, bytes are rounded up to
    the blocks of its allocator."""

    def __init__(self, device_type: str = HOST.type, *, legacy: bool = LEGACY_PROFILER) -> None:
        self._legacy, self._device_type = legacy, device_type
        kineto: dict[str, Any] = {} if legacy else {"use_kineto": True}
        self._profile: Any = (profiler_legacy if legacy else profiler).profile(profile_memory=True, **kineto)
        self._earlier: list[int] = []

    def start(self) -> None:
        """Begins the recording. Raises `RuntimeError` if a profiler is active in this thread."""
        if profiler_is_active():
            raise RuntimeError(
                "memory cannot be metered here: a torch profiler or another memopt meter is already active in this "
                "thread, and torch allows one; end that one first"
            )
        _map_blocks_from(2**20)
        self._profile._start_trace() if self._legacy else self._profile.__enter__()

    def declare(self, address: int, nbytes: int) -> None:
        """Records a block that is already allocated as if it were allocated now, so that its free is recorded too:
        torch knows the sizes only of blocks that were allocated while a profiler ran. If one of these was freed while
        none ran, torch may assume its size for the next block at that address."""
        _declare_block()(address, nbytes)

    def stop(self) -> list[int]:
        """Ends the recording and returns its events in order of time: bytes allocated, or minus the bytes freed."""
        try:
            return self._earlier + self._events()
        finally:
            _map_blocks_from(2**25)

    def since_last(self) -> list[int] | None:
        """The events since the last call, or the start; recording continues. None where that is known only after
        `stop`: with kineto, which is slow to restart, and in a backward, since autograd keeps the profiler it began
        with."""
        if not self._legacy or current_backward() >= 0:
            return None
        events = self._events()
        self._profile._start_trace()
        self._earlier += events
        return events

    def _events(self) -> list[int]:
        if not self._legacy:
            self._profile.__exit__(None, None, None)
            device = getattr(_autograd.DeviceType, self._device_type.upper())
            events = self._profile.kineto_results.events()
            memory = [e for e in events if e.name() == "[memory]" and e.device_type() == device]
            return [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]
        # torch's own __exit__ would parse every operator event, of which only the memory records are needed.
        threads = [list(records) for records in _autograd._disable_profiler_legacy()]
        memory = [r for r in chain.from_iterable(threads) if r.kind() == "memory_alloc"]
        if len(threads) > 1:
            begin = next(r for r in chain.from_iterable(threads) if r.name() == "__start_profile")
            memory.sort(key=begin.cpu_elapsed_us)
        usage = [getattr(r, f"{self._device_type}_memory_usage")() for r in memory]
        return [nbytes for nbytes in usage if nbytes]


def _map_blocks_from(nbytes: int) -> None:
    """Sets the size from which glibc allocates each block with a memory mapping of its own; 2**25 is the largest value
    to which its adaptive threshold grows. Otherwise the profiler's small records land in large blocks that are freed
    while it runs, and each new large block takes fresh memory: 8 GB for a thousand temporaries of 4 MB."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries: no such fragmentation was seen
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


_M_MMAP_THRESHOLD = -3


@functools.cache
def libc10() -> ctypes.CDLL | None:
    """torch's library libc10, which holds the allocators; None where it goes by another name (Windows)."""
    lib = Path(torch.__file__).parent / "lib"
    found = [path for path in (lib / "libc10.so", lib / "libc10.dylib") if path.exists()]
    try:
        return ctypes.CDLL(str(found[0]))
    except (IndexError, OSError):
        return None


@functools.cache
def _declare_block() -> Callable[[int, int], None]:
    """`c10::profiledCPUMemoryReporter().New(address, nbytes)`, which libc10 exports without a Python binding."""
    c10 = libc10()
    try:
        reporter, new = (getattr(c10, symbol) for symbol in _SYMBOLS)
    except AttributeError:
        raise RuntimeError("CPU memory cannot be measured: this torch's libc10 lacks its memory reporter") from None
    reporter.restype = ctypes.c_void_p
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return functools.partial(new, reporter())


def profiler_is_active() -> bool:
    """Whether a torch profiler is recording in this thread."""
    return bool(_autograd._profiler_enabled())


_READS = ("tolist", "numpy", "__array__")


def uncomputed(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A `protected` tensor on the CPU whose storage takes no memory: such tensors share read-only pages of zeros."""
    elements = 1 + sum((number - 1) * step for number, step in zip(size, stride, strict=True)) if all(size) else 0
    nbytes = elements * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(_pages(nbytes), HOST, nbytes)
    tensor = torch.empty(0, dtype=dtype, device=HOST)
    return protected(tensor.set_(storage, 0, tuple(size), tuple(stride)))


def protected(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor; from now on, writing to its memory and reading its address raise `RuntimeError`."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Another leaf, a parameter for a parameter, in the same memory, with gradient, hooks and version of its own."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.data, requires_grad=tensor.requires_grad)
    return tensor.data.requires_grad_(tensor.requires_grad)


def _pages(nbytes: int) -> int:
    """Returns the address of at least `nbytes` bytes of address space that can only be read, and take no memory until
    they are. They are never given back, since nobody knows how long a tensor in them lives."""
    if not _regions or len(_regions[-1]) < nbytes:
        size, flags = max(_LEAST_REGION, 2 * nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _regions.append(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ))
    return int(np.frombuffer(_regions[-1], np.uint8).ctypes.data)


_regions: list[mmap.mmap] = []
_LEAST_REGION = 2**32


def reads_raise(error: type[Exception]) -> AbstractContextManager[None]:
    """A context in which `tolist`, `numpy` and `__array__` of any tensor raise `error` in this thread."""

    def seen() -> None:
        raise error

    return reads_seen(seen)


@contextmanager
def reads_seen(seen: Callable[[], None]) -> Iterator[None]:
    """A context in which `tolist`, `numpy` and `__array__` of any tensor call `seen` first in this thread: they read
    memory without the dispatcher."""
    tensors: Any = torch.Tensor
    own = {name: vars(tensors).get(name) for name in _READS}
    thread = threading.get_ident()
    try:
        for name in _READS:
            setattr(tensors, name, _seeing(seen, thread, getattr(tensors, name)))
        yield
    finally:
        for name, method in own.items():
            if method is None:
                delattr(tensors, name)
            else:
                setattr(tensors, name, method)


def _seeing(seen: Callable[[], None], thread: int, read: Any) -> Any:
    def seeing(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            seen()
        return read(*args, **kwargs)

    return seeing

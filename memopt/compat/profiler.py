"""The memory events of torch's CPU allocator, read through the autograd profilers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler, profiler_legacy

# `torch._C` is the extension module: these parts have no complete stubs, hence Any.
_autograd: Any = torch._C._autograd


LEGACY_PROFILER = hasattr(_autograd, "_enable_profiler_legacy")
"""The profiler that came before kineto: same memory events, no kineto start-up, nothing written to stderr.

Present in torch 2.11 to 2.13, deprecated; where it is gone, kineto serves, and some builds (2.13) then write two
`USDT:…` lines to stderr a session, which no log level silences.
"""


class CpuMemoryEvents:
    """Records what this thread allocates and frees on the CPU, through torch's allocator, from `start` to `stop`.

    Both profilers see allocations inside kernels and in compiled code, and those of threads that torch itself starts
    with this thread's state (the backward pass, `torch.jit.fork`); not those of other Python threads.
    """

    def __init__(self, *, legacy: bool = LEGACY_PROFILER) -> None:
        self._legacy = legacy
        kineto: dict[str, Any] = {} if legacy else {"use_kineto": True}
        self._profile: Any = (profiler_legacy if legacy else profiler).profile(profile_memory=True, **kineto)

    def start(self) -> None:
        if profiler_is_active():
            raise RuntimeError(
                "memory cannot be metered here: a torch profiler or another memopt meter is already active in this "
                "thread, and torch allows one; end that one first"
            )
        _map_blocks_from(2**20)
        self._profile._start_trace() if self._legacy else self._profile.__enter__()

    def declare(self, address: int, nbytes: int) -> None:
        """Records a block that is alive already as if allocated now, so that its free will be recorded too.

        torch knows the size of those blocks only that it saw allocated while some profiler ran, and leaves out the
        frees of others; of a block that was freed unseen it keeps a stale size.
        """
        _declare_block()(address, nbytes)

    def stop(self) -> list[int]:
        """Ends the recording and returns the events in order of time: bytes allocated, or minus the bytes freed."""
        try:
            return self._events()
        finally:
            _map_blocks_from(2**25)

    def _events(self) -> list[int]:
        if not self._legacy:
            self._profile.__exit__(None, None, None)
            cpu = _autograd.DeviceType.CPU
            events = self._profile.kineto_results.events()
            memory = [e for e in events if e.name() == "[memory]" and e.device_type() == cpu]
            return [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]
        # torch's own __exit__ would parse every operator event: only the raw memory records are wanted.
        threads = [list(records) for records in _autograd._disable_profiler_legacy()]
        if len(threads) == 1:
            return [r.cpu_memory_usage() for r in threads[0] if r.kind() == "memory_alloc"]
        begin = next(r for r in chain.from_iterable(threads) if r.name() == "__start_profile")
        memory = [r for r in chain.from_iterable(threads) if r.kind() == "memory_alloc"]
        return [r.cpu_memory_usage() for r in sorted(memory, key=begin.cpu_elapsed_us)]


def _map_blocks_from(nbytes: int) -> None:
    """Have glibc take blocks from `nbytes` on from the system one by one.

    The profiler's many small records would else settle in every large block that is freed while it runs, and glibc, its
    heap in splinters, would take fresh memory for each new one: 8 GB for a thousand temporaries of 4 MB. 2**25 is where
    glibc's own, moving threshold ends.
    """
    with contextlib.suppress(OSError, AttributeError):  # not glibc: no such splinters seen
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


_M_MMAP_THRESHOLD = -3


@functools.cache
def _declare_block() -> Callable[[int, int], None]:
    """`c10::profiledCPUMemoryReporter().New(address, nbytes)`: exported by libc10, without a Python binding."""
    lib = Path(torch.__file__).parent / "lib"
    found = [path for path in (lib / "libc10.so", lib / "libc10.dylib") if path.exists()]
    try:
        c10 = ctypes.CDLL(str(found[0]))
        reporter, new = c10._ZN3c1025profiledCPUMemoryReporterEv, c10._ZN3c1025ProfiledCPUMemoryReporter3NewEPvm
    except (IndexError, OSError, AttributeError):
        raise RuntimeError(f"the CPU meter needs libc10's memory reporter, which {lib} does not have") from None
    reporter.restype = ctypes.c_void_p
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return functools.partial(new, reporter())


def profiler_is_active() -> bool:
    """Whether any torch profiler records in this thread."""
    return bool(_autograd._profiler_enabled())

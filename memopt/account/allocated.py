"""The bytes that are allocated on a device, read in microseconds, as a sign that what lies there has grown."""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from memopt.compat.host import HOST
from memopt.device.devices import device_of


def allocated_bytes(device: torch.device) -> int | None:
    """The bytes that are allocated now: on CUDA by torch, on the CPU by `malloc` in the whole process, whatever for.

    On CUDA they are those that were asked for: blocks that the allocator does not split are up to a megabyte larger,
    which is in the account's row for the rounding of blocks. On the CPU only differences are of use, and a few kB of
    them are Python's own. None where it is not known: with another C library than glibc 2.33 or later, and on other
    devices.
    """
    kind = device_of(device)
    if kind.caching:
        return kind.requested_bytes(device)
    if not kind.is_host or (read := _mallinfo2()) is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd) or None  # 0 where another allocator stands in for that of glibc


class AllocationLimit:
    """A limit of the bytes that the tensors of this process hold, read in a hundredth of the time of `allocated_bytes`.

    `malloc` says at first what it can allocate before it maps more memory. Later the process can have allocated no more
    than that and what it has mapped since. Shared memory, which `malloc` does not know, counts with its resident pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unmapped: int | None = None
        """The bytes that `malloc` could allocate at first less those that were mapped."""

    def bytes(self) -> int | None:
        """No less than all that is allocated now, mostly far more; None where that is not known, and on other devices
        than the CPU."""
        if self._device.type != HOST.type or (mapped := _mapped_bytes()) is None:
            return None
        if self._unmapped is None:
            if (allocatable := _allocatable_bytes()) is None:
                return None
            self._unmapped = allocatable - mapped.private
        return self._unmapped + mapped.private + mapped.shared


def _allocatable_bytes() -> int | None:
    """The bytes that `malloc` has allocated, and those that it can allocate before it maps more memory."""
    if (read := _mallinfo2()) is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd + info.fordblks) or None


class _Mapped(NamedTuple):
    """Memory that the process has mapped, in bytes."""

    private: int
    """Private and writable, with that of `malloc`."""
    shared: int
    """Resident pages of files and of shared memory."""


def _mapped_bytes() -> _Mapped | None:
    """None where the system does not say."""
    try:
        pages = list(map(int, os.pread(_statm_descriptor(os.getpid()), 256, 0).split()))
        return _Mapped(pages[5] * mmap.PAGESIZE, pages[2] * mmap.PAGESIZE)
    except (OSError, IndexError, ValueError):
        return None


@lru_cache(maxsize=1)
def _statm_descriptor(process: int) -> int:
    """A file descriptor of `/proc/<pid>/statm`, which stays open: opening the file takes three times as long as reading
    it. A forked process opens its own."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _mallinfo2() -> Any:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    read.restype = _Mallinfo2
    return read

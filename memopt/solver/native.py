"""Machine code for the solvers' inner loops, from one Python source, in whichever of three ways is at hand.

Ready-made: a wheel, or an install on a machine with a C compiler, carries the extension `_kernels`, which `ahead` makes
from the kernels. It is used only while its fingerprint is that of the kernels' source. Without it numba compiles each
kernel at its first call and keeps the machine code on disk. Without numba the kernels run as plain Python. The
schedules are the same in all three ways.

Kernels are loops over arrays that are made outside of them, and call only one another.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# The modules whose source decides what the kernels compute.
KERNEL_MODULES = (
    "arrays",
    "chain_table",
    "links",
    "liveness",
    "look_ahead",
    "min_heap",
    "offload.place",
    "offload.queue",
    "offload.timing",
    "polish",
    "repair",
    "replay",
    "ruin",
)


def kernel_sources() -> list[Path]:
    """The files of the kernels."""
    return [Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py") for module in KERNEL_MODULES]


def fingerprint() -> int:
    """A number below 2^63 that changes with the source of the kernels."""
    digest = hashlib.sha256()
    for source in kernel_sources():
        digest.update(source.read_bytes().replace(b"\r\n", b"\n"))
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def entry_name(function: Callable[..., Any]) -> str:
    """The name under which the extension exports a kernel: its module's and its own."""
    return f"{function.__module__.rpartition('.')[2]}_{function.__name__.lstrip('_')}"


@functools.cache
def ready_made() -> ModuleType | None:
    """The extension, or None where it is missing or was made from other kernels."""
    try:
        from memopt.solver import _kernels  # type: ignore[attr-defined]  # made by setup.py
    except ImportError:
        return None
    return _kernels if _kernels.fingerprint() == fingerprint() else None


@functools.cache
def compiler() -> Any:
    """`numba.njit`, or None where numba is not installed."""
    try:
        import numba
    except ImportError:  # numba lags behind new Python releases; the plans are the same, only slower to find
        return None
    return numba.njit


def is_compiled() -> bool:
    """Whether kernels run as machine code, not as plain Python."""
    return ready_made() is not None or compiler() is not None


def native(function: Function) -> Function:
    """Machine code for a kernel that Python calls: ready-made, or compiled at its first call."""
    library = ready_made()
    return _compiled(function, {}) if library is None else getattr(library, entry_name(function), function)


def native_part(function: Function) -> Function:
    """The same for a part of other kernels, which Python does not call: plain Python where those are ready-made."""
    if ready_made() is not None:
        return function
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def _compiled(function: Function, options: dict[str, bool]) -> Function:
    njit = compiler()
    if njit is None:
        return function
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache (read-only installs): compile in each process
        return njit(**options)(function)

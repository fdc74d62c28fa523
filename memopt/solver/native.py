"""Compiles the solvers' hot loops with numba where it is installed; without it the same source runs as plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

compiler: Any = None
try:
    import numba

    compiler = numba.njit
except ImportError:  # numba lags behind new Python releases; the plans are the same, only slower to find
    pass


def native(function: Function) -> Function:
    """Compile `function` at its first call and keep the machine code on disk for later processes."""
    if compiler is None:
        return function
    try:
        return compiler(cache=True)(function)
    except RuntimeError:  # no writable place for the cache (read-only installs): compile in each process
        return compiler(function)

"""Compiles the solvers' hot loops with numba where it is installed; without it the same source runs as plain Python.

Kernels keep to loops over arrays that are made outside: compiling stays a matter of seconds, once.
"""

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
    return _compiled(function, {})


def native_part(function: Function) -> Function:
    """The same for a part of other kernels, which Python never calls: without the code that unpacks its arguments."""
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def _compiled(function: Function, options: dict[str, bool]) -> Function:
    if compiler is None:
        return function
    try:
        return compiler(cache=True, **options)(function)
    except RuntimeError:  # no writable place for the cache (read-only installs): compile in each process
        return compiler(**options)(function)

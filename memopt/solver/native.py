"""Compiles the solvers' inner loops ("kernels") from one Python source, in the first of three ways that is available.

Ahead of time: a wheel, or an install on a machine with a C compiler, contains the extension `_kernels`, which
`setup.py` builds from the kernels. It is used only if its fingerprint matches the kernels' source. Without it numba
compiles each kernel at its first call and caches the machine code on disk. Without numba the kernels run as plain
Python. The schedules are the same in all three ways.

Kernels are loops over arrays that their callers allocate, and they call only other kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# The modules whose source decides what the kernels compute.
KERNEL_MODULES = (
    "arrays", "chain_plans", "links", "max_flow", "offload_place", "offload_search", "polish", "repair", "replay",
)  # fmt: skip


def kernel_sources() -> list[Path]:
    """The source files of `KERNEL_MODULES`: those with the inner loops that are compiled."""
    return [Path(__file__).with_name(f"{module}.py") for module in KERNEL_MODULES]


def fingerprint() -> int:
    """A hash below 2^63 of the kernels' source files, the same for either kind of line ending."""
    digest = hashlib.sha256()
    for source in kernel_sources():
        digest.update(source.read_bytes().replace(b"\r\n", b"\n"))
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def entry_name(function: Callable[..., Any]) -> str:
    """The name under which the extension exports a kernel: `<module>_<function>`."""
    return f"{function.__module__.rpartition('.')[2]}_{function.__name__.lstrip('_')}"


@functools.cache
def ready_made() -> ModuleType | None:
    """The extension, or None if it is missing or was built from another source."""
    try:
        from memopt.solver import _kernels  # type: ignore[attr-defined]  # made by setup.py
    except ImportError:
        return None
    try:
        return _kernels if _kernels.fingerprint() == fingerprint() else None
    except FileNotFoundError:  # only compiled files are installed, and the extension was made with them
        return _kernels


@functools.cache
def compiler() -> Any:
    """`numba.njit`; None if numba is not installed."""
    try:
        import numba
    except ImportError:  # numba lags behind new Python releases; the plans are the same, only slower to find
        return None
    return numba.njit


def is_compiled() -> bool:
    """Whether kernels run as machine code and not as plain Python."""
    return ready_made() is not None or compiler() is not None


def native(function: Function) -> Function:
    """Decorator for a kernel that Python calls: machine code from the extension, or compiled at the first call."""
    library = ready_made()
    return _compiled(function, {}) if library is None else getattr(library, entry_name(function), function)


def native_part(function: Function) -> Function:
    """Decorator for a kernel that only kernels call. Where the extension is used, its kernels contain the
    function, and this one stays plain Python, since nothing calls it."""
    if ready_made() is not None:
        return function
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def _compiled(function: Function, options: dict[str, bool]) -> Function:
    """The function compiled by numba at its first call; the function itself if numba is not installed."""
    njit = compiler()
    if njit is None:
        return function
    with _cache_of_this_source():
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no writable place for the cache (read-only installs): compile in each process
            return njit(**options)(function)


@contextmanager
def _cache_of_this_source() -> Iterator[None]:
    """Context in which numba caches machine code in a folder of its own for the fingerprint of the kernels' source.
    Numba's cache notices a change of a kernel's own file, but not of the kernels that it calls, and fails on an index
    that names a class that no longer exists."""
    config: Any = importlib.import_module("numba").config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(Path(before or Path(__file__).parent / "__pycache__") / f"kernels-{fingerprint():x}")
    try:
        yield
    finally:
        config.CACHE_DIR = before


def extension() -> Any:
    """The setuptools extension with every kernel that Python calls. Needs numba, and a C compiler to be built."""
    pycc: Any = importlib.import_module("numba.pycc")
    library = pycc.CC("_kernels", source_module=__name__)
    made_from = fingerprint()

    def fingerprint_then() -> int:
        return made_from

    library.export("fingerprint", "int64()")(fingerprint_then)
    for kernel in entries():
        library.export(entry_name(kernel.py_func), signature(kernel.py_func))(kernel.py_func)
    built = library.distutils_extension(depends=[str(source) for source in kernel_sources()])
    built.optional = True
    return built


def entries() -> list[Any]:
    """The kernels that Python calls, that is those decorated with `native`, as numba has wrapped them."""
    modules = [importlib.import_module(f"memopt.solver.{name}") for name in KERNEL_MODULES]
    values = (value for module in modules for value in vars(module).values() if hasattr(value, "targetoptions"))
    return [value for value in dict.fromkeys(values) if "no_cpython_wrapper" not in value.targetoptions]


def signature(kernel: Callable[..., Any]) -> tuple[Any, ...]:
    """The numba types of a kernel's parameters, from its annotations."""
    module = importlib.import_module(kernel.__module__)
    names = [parameter.annotation for parameter in inspect.signature(kernel).parameters.values()]
    return tuple(_numba_type(name, module) for name in names)


def _numba_type(annotation: str, module: Any) -> Any:
    """The numba type of an annotation: a scalar, one of the array types, or a named tuple that `module` knows."""
    types: Any = importlib.import_module("numba.types")
    arrays = {
        "Ints": types.int64[::1],
        "IntTable": types.int64[:, ::1],
        "Floats": types.float64[::1],
        "Flags": types.boolean[::1],
        "Table": types.float32[:, ::1],
    }
    scalars = {"int": types.int64, "float": types.float64, "bool": types.boolean, "np.float32": types.float32}
    if annotation in arrays or annotation in scalars:
        return {**arrays, **scalars}[annotation]
    tuple_type = getattr(module, annotation)
    origin = importlib.import_module(tuple_type.__module__)
    hints = [getattr(hint, "__forward_arg__", hint) for hint in tuple_type.__annotations__.values()]
    return types.BaseTuple.from_types([_numba_type(hint, origin) for hint in hints], tuple_type)

"""Compiles the kernels ahead of time into the extension `memopt.solver._kernels`; `setup.py` calls it.

numba's ahead-of-time compiler makes code for any CPU of the platform. The built extension does not need numba.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from memopt.solver.native import KERNEL_MODULES, entry_name, fingerprint, kernel_sources


def extension() -> Any:
    """The setuptools extension with every kernel that Python calls. Needs numba, and a C compiler to be built."""
    pycc: Any = importlib.import_module("numba.pycc")
    library = pycc.CC("_kernels", source_module=__name__)
    made_from = fingerprint()

    def fingerprint_then() -> int:
        return made_from

    library.export("fingerprint", "int64()")(fingerprint_then)
    for kernel in entries():
        library.export(entry_name(kernel), signature(kernel))(kernel)
    built = library.distutils_extension(depends=[str(source) for source in kernel_sources()])
    built.optional = True
    return built


def entries() -> list[Callable[..., Any]]:
    """The kernels that Python calls, that is those decorated with `native`, as plain Python functions."""
    kernels = []
    for name in KERNEL_MODULES:
        module = importlib.import_module(f"memopt.solver.{name}")
        for value in vars(module).values():
            options = getattr(value, "targetoptions", None)
            if options is not None and value.__module__ == module.__name__ and "no_cpython_wrapper" not in options:
                kernels.append(value.py_func)
    return kernels


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

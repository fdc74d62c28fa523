"""Inductor's C++ kernels compiled quickly, for trials that check numbers and bytes but measure no time."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import cpp_builder
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache

PREFIX = "torch/csrc/inductor/cpp_prefix.h"
"""The header that all kernels include, and that inductor precompiles."""


@contextmanager
def quick_kernels() -> Iterator[None]:
    """Context in which all kernels of a compiled graph are built by one call of the compiler, without optimization, and
    only when one of them first runs.

    Most of the time that the compiler takes for a small kernel is spent on reading its headers, and of several plans
    that memopt compiles for their bytes, one runs. Kernels are the ones that inductor writes; one that raises an
    exception ends the process."""
    flags = cpp_builder._get_optimization_cflags

    def unoptimized(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compiling, linking = flags(*args, **kwargs)
        return ["O0" if flag == "O3" else flag for flag in compiling if flag != "g1"], linking

    def cpp_pybinding(self: AsyncCompile, argtypes: list[str], source_code: str) -> Callable[..., None]:
        together = vars(self).setdefault("_together", _Kernels())
        return together.add(argtypes, source_code)

    with (
        patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        patch.object(cpp_builder, "_get_optimization_cflags", unoptimized),
    ):
        yield


class _Library(CppCodeCache):
    """A library of kernels, which is called by ctypes."""

    cpp_compile_command_flags = CppPythonBindingsCodeCache.cpp_compile_command_flags

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str:
        return PREFIX


class _Kernels:
    """The kernels of one compiled graph."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.library: Any = None

    def add(self, argtypes: list[str], source: str) -> Callable[..., None]:
        """The kernel of this C++ code as a function."""
        number = len(self.sources)
        code, entries = re.subn(r'(extern "C"\s+void\s+kernel)\(', rf"\g<1>_{number}(", source)
        assert entries == 1, f"a kernel of inductor has {entries} entries:\n{source}"
        self.sources.append(code.replace(f"#include <{PREFIX}>", ""))
        types = [_ctype(argtype) for argtype in argtypes]
        entry = None

        def run(*arguments: Any) -> None:
            nonlocal entry
            if entry is None:
                entry = getattr(self.load(), f"kernel_{number}")
                entry.argtypes, entry.restype = types, None
            entry(*(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments))

        return run

    def load(self) -> Any:
        """The library, compiled when this is first called."""
        if self.library is None:
            parts = (f"namespace kernels_{number} {{\n{code}\n}}" for number, code in enumerate(self.sources))
            self.library = _Library.load("\n".join([f"#include <{PREFIX}>", *parts]))
        return self.library


def _ctype(argtype: str) -> Any:
    if argtype.endswith("*"):
        return ctypes.c_void_p
    return {"int64_t": ctypes.c_int64, "float": ctypes.c_float}[argtype.removeprefix("const ")]

"""Builds the extension with the solvers' kernels; everything else about the package is in pyproject.toml.

Without numba or a C compiler the package installs all the same, and numba compiles the kernels at their first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup


def kernels() -> list[Any]:
    """The extension, or nothing where numba is not there to make it."""
    # The packages stand empty, so that their __init__ modules do not import torch, which a build does not have.
    for name in ("memopt", "memopt.solver"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(Path(__file__).parent.joinpath(*name.split(".")))]
    sys.modules["memopt.solver._kernels"] = None  # type: ignore[assignment]  # an older build is not looked at
    try:
        return [importlib.import_module("memopt.solver.native").extension()]
    except ImportError as missing:
        print(f"memopt: the kernels are not built ({missing}); numba compiles them at their first use", file=sys.stderr)
        return []


setup(ext_modules=kernels())

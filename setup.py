"""Builds the extension with the solvers' kernels; everything else about the package is in pyproject.toml.

Where it cannot be built (no numba, no C compiler, no headers of Python) the package installs all the same: the kernels
run as plain Python, or through numba if that is installed, with the same plans.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import setup


def kernels() -> list[Any]:
    """The extension, or nothing where it cannot be made."""
    # The packages stand empty, so that their __init__ modules do not import torch, which a build does not have.
    for name in ("memopt", "memopt.solver"):
        package = sys.modules.setdefault(name, ModuleType(name))
        package.__path__ = [str(Path(__file__).parent.joinpath(*name.split(".")))]
    sys.modules["memopt.solver._kernels"] = None  # type: ignore[assignment]  # an older build is not looked at
    try:
        return [importlib.import_module("memopt.solver.native").extension()]
    except Exception as failure:  # numba has an error of its own for each of what may be missing or too new
        reason = str(failure).strip().partition(". ")[0] or type(failure).__name__
        print(
            f"memopt: the solvers' kernels are not built ({reason}); they run "
            "as plain Python, or compiled at their first use if numba is installed: pip install 'memopt[numba]'",
            file=sys.stderr,
        )
        return []


setup(ext_modules=kernels())

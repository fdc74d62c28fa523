"""Whether this torch has the private names that memopt uses, as they were in the versions that were tested: those that
each module of `memopt.compat`, and `passes.compat`, declares in `PRIVATE_NAMES`. `check` looks them up when memopt is
first used; those in parts of torch that are imported later, it looks up then."""

from __future__ import annotations

import ctypes
import functools
import inspect
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import torch

from memopt.compat.host import libc10
from memopt.errors import TorchNamesError
from passes.compat import Private

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last version of torch that were tested; pyproject.toml bounds torch by the same."""

_MEND = (
    "install a torch that memopt was tested with: "
    f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
)

_checked: set[Private] = set()
_known = [0]
"""The number of modules that were imported at the latest check: without new ones there is nothing to check."""
_told: list[tuple[int, ...]] = []
"""The versions for which a warning was given."""


def check() -> None:
    """Check the private names that loaded modules of memopt use of those modules of torch that are imported, each once.

    Raises `TorchNamesError` with all names that are absent and needed. Warns once of a torch that is newer than those
    that were tested, and of names that are absent but not needed, or that cannot be called as memopt calls them.
    """
    if len(sys.modules) == _known[-1]:  # at every training call
        return
    absent: list[str] = []
    different: list[str] = []
    for declared, user in _unchecked():
        _checked.add(declared)
        if fault := _fault(declared):
            (absent if fault is _ABSENT and declared.needed else different).append(f"{declared.path} {fault} ({user})")
    if absent:
        _checked.clear()
        raise _lacking([*absent, *different])
    _known[:] = [len(sys.modules)]
    newer = _version() > NEWEST and _version() not in _told
    if different or newer:
        _told.append(_version())
        how = "is newer than" if newer else "differs from"
        what = f": {'; '.join(different)}" if different else ""
        warnings.warn(
            f"torch {torch.__version__} {how} those that memopt was tested with{what}; memopt.compare(model, batch) "
            f"shows whether a model's numbers are right; if they are not, {_MEND}",
            stacklevel=2,
        )


def missing_names(error: ImportError) -> TorchNamesError:
    """The error that lists all names which memopt imports from torch and this torch lacks. `error` is the `ImportError`
    of the first of them."""
    found = [str(error)]
    for info in iter_modules([str(Path(__file__).parent)], "memopt.compat."):
        try:
            import_module(info.name)
        except ImportError as other:
            found.append(str(other))
    return _lacking([text.partition(" (")[0] for text in dict.fromkeys(found)])


def _lacking(names: list[str]) -> TorchNamesError:
    return TorchNamesError(
        f"memopt needs private names of torch that torch {torch.__version__} lacks: {'; '.join(names)}; {_MEND}"
    )


_ABSENT = "is missing"


def _unchecked() -> Iterator[tuple[Private, str]]:
    """The declared names that can be checked now and have not been, each with the module that uses it."""
    for user, module in list(sys.modules.items()):
        if user == "passes.compat" or user.startswith("memopt.compat."):
            for declared in getattr(module, "PRIVATE_NAMES", ()):
                if declared not in _checked and _holder(declared.module) is not None:
                    yield declared, user


def _holder(module: str) -> ModuleType | ctypes.CDLL | None:
    """The module of that name if it is imported; for "libc10", that library of torch's. None where there is none, and
    while a thread imports it."""
    if module == "libc10":
        return libc10()
    found = sys.modules.get(module)
    return None if getattr(getattr(found, "__spec__", None), "_initializing", False) else found


def _fault(declared: Private) -> str | None:
    """The fault of a name: that it is absent, or how it cannot be called; None if it is as it was tested."""
    if not declared.since <= _version() <= declared.until:
        return None
    found: Any = _holder(declared.module)
    *owners, last = declared.attributes.split(".")
    for name in owners:
        found = getattr(found, name, None)
    if not _has(found, last):
        return _ABSENT
    return _not_called(getattr(found, last, None), declared.call)


def _has(owner: Any, name: str) -> bool:
    """Whether an object, or the instances of a class, have an attribute: it is there, or the class annotates it, or a
    method of the class names it."""
    if hasattr(owner, name):
        return True
    return isinstance(owner, type) and any(name in _set_by(one) for one in owner.__mro__[:-1])


@functools.lru_cache(maxsize=64)
def _set_by(owner: type) -> frozenset[str]:
    """The attributes that a class annotates, and all names of attributes that its methods read or set."""
    functions = (inspect.unwrap(value) for value in vars(owner).values() if inspect.isfunction(value))
    names = (name for function in functions if inspect.isfunction(function) for name in function.__code__.co_names)
    return frozenset([*vars(owner).get("__annotations__", {}), *names])


def _not_called(function: Any, call: str | None) -> str | None:
    """The fault in a call of a function, in words; None if it can be called so. `call` lists the arguments by
    position, and keywords as `name=`."""
    if call is None:
        return None
    words = call.replace(",", " ").split()
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one without a signature
        return None if callable(function) else "is no function"
    try:
        signature.bind(*[w for w in words if not w.endswith("=")], **{w[:-1]: w for w in words if w.endswith("=")})
    except TypeError:
        return f"takes {signature} and not ({call})"
    return None


def _version() -> tuple[int, ...]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)

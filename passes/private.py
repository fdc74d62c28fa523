"""How a module declares the private names of torch that it uses, in `PRIVATE_NAMES`, which `memopt.compat.check` reads;
and how it replaces one for a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Private", "private", "replaced"]


@dataclass(frozen=True)
class Private:
    """A private name of torch, or of another library whose code is replaced."""

    module: str
    attributes: str
    """The name within the module: `function`, `Class.method`, or an attribute that the instances of a class have."""
    call: str | None = None
    """The arguments that it is called with, in words: those by position, then keywords as `name=`. None for what is not
    called, or is called with what it was called with."""
    since: tuple[int, int] = (0, 0)
    until: tuple[int, int] = (999, 0)
    """The first and the last version of torch that has it; in others it is not looked for."""
    needed: bool = True
    """Whether memopt cannot run without it; if False, there is a warning where it is missing."""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attributes}"


def private(
    module: str,
    *names: str,
    call: str | None = None,
    since: tuple[int, int] = (0, 0),
    until: tuple[int, int] = (999, 0),
    needed: bool = True,
) -> tuple[Private, ...]:
    """The names of one module, one or several in a text with spaces between them, declared alike. Attributes that only
    the instances of a class have are declared with `needed=False`: a class need not show them, so that not finding them
    proves nothing."""
    return tuple(Private(module, name, call, since, until, needed) for text in names for name in text.split())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute of an object has another value. Afterwards it has the one that it had before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

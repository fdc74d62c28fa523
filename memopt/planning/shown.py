"""The one way up from plans to `memopt.show`, which stands above them and reads them."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def shown(name: str) -> Any:
    """A module of `memopt.show`, loaded when something is shown: a plan, a frontier or a diff gives itself to one of
    its functions, and knows nothing else of it."""
    return import_module(f"memopt.show.{name}")

"""The settings of torch's caching allocator for CUDA."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import torch

from passes.compat import private

PRIVATE_NAMES = private("torch._C: _accelerator_setAllocatorSettings [optional]")

# `torch._C` is the extension module: this part has no stubs.
_set_settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
_turned_on: list[bool] = []


def expandable_segments() -> bool:
    """Whether torch's allocator uses expandable segments in this process: by the environment, or since
    `turn_on_expandable_segments` was called."""
    return bool(_turned_on) or _in_environment() is True


def may_turn_on_expandable_segments() -> bool:
    """Whether `turn_on_expandable_segments` would change anything: on Linux, since torch has these segments nowhere
    else, if they are not in use yet and the environment neither turns them off nor names another allocator."""
    asked = _in_environment() is not None or "cudaMallocAsync" in _settings()
    return sys.platform == "linux" and _set_settings is not None and not _turned_on and not asked


def turn_on_expandable_segments() -> None:
    """Have torch's allocator use expandable segments from now on, with the other settings of the environment. Segments
    that it holds already stay in use unchanged."""
    if may_turn_on_expandable_segments():
        _set_settings(",".join(filter(None, (_settings(), "expandable_segments:True"))))
        _turned_on.append(True)


def _settings() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _in_environment() -> bool | None:
    """The setting of expandable segments in the environment; None where it is not set."""
    found = re.search(r"expandable_segments\s*:\s*(True|False)", _settings())
    return None if found is None else found[1] == "True"

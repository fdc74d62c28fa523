"""Measurements on a CUDA card."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def temporary_bytes(run: Callable[[], Any]) -> int:
    """The most bytes allocated while `run` runs, beside those of its results."""
    run()  # libraries allocate their workspaces at the first call
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    result = run()
    torch.cuda.synchronize()
    beside = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del result
    return beside

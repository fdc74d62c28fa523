"""The card that these tests run on: a real one, or the stand-in, which allocates but does not compute."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers.initialization import no_init_weights

MB = 1024**2
STAND_IN = hasattr(ctypes.CDLL(None), "memopt_card_stand_in")
"""Whether CUDA's libraries are those of `tests/card/stand_in`."""
needs_numbers = pytest.mark.skipif(STAND_IN, reason="the stand-in for a card does not compute")


def without_values() -> AbstractContextManager[None]:
    """A context in which models of transformers leave their parameters as they were allocated. Some ways to fill them
    read values back, which the stand-in does not have."""
    context: AbstractContextManager[None] = no_init_weights()
    return context


def forget() -> None:
    """Free what is not referred to, and give the memory back to the card."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


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


def cap(limit_bytes: float) -> None:
    """Limit the process to a number of bytes of torch's allocator."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.reset_peak_memory_stats()

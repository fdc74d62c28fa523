"""Triton's autotuning: a kernel that inductor wrote is timed in all of its configurations when it first runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from passes.compat import private

PRIVATE_NAMES = (*private("torch._inductor.runtime.benchmarking", "benchmarker.benchmark_gpu"),)

__all__ = ["autotuning_within"]

_PAGE = 20 * 1024**2
"""No segment is larger than its blocks by this many bytes or more, expandable or not."""


@contextmanager
def autotuning_within(limit_bytes: int) -> Iterator[None]:
    """A block in which kernels are timed while torch's allocator for CUDA holds at most `limit_bytes`.

    Before each run a kernel's timing fills a buffer of the size of the card's cache, which would be allocated beside
    all that the step holds then. It is left out where there is no room for it. What a timing allocates is returned to
    the card, so that later blocks lie as if no kernel had been timed. Of a kernel for which there is no memory to be
    timed the first configuration runs.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    attributes = vars(benchmarker)
    before, whole = dict(attributes), torch.cuda.get_device_properties().L2_cache_size
    timed = benchmarker.benchmark_gpu

    def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
        attributes["L2_cache_size"] = whole if _fits(whole, limit_bytes) else 0
        try:
            with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
                return timed(*args, **kwargs)
        except torch.OutOfMemoryError:
            return math.inf

    attributes["benchmark_gpu"] = benchmark_gpu
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def _fits(nbytes: int, limit_bytes: int) -> bool:
    """Whether a new segment for a block of this size is within the limit of what the allocator holds."""
    return torch.cuda.memory_reserved() + -(-nbytes // _PAGE) * _PAGE <= limit_bytes

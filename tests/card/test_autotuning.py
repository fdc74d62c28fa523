"""The memory that the timing of inductor's kernels takes, in a process that has no more than a budget."""

from __future__ import annotations

import math

import torch

from memopt.compat.inductor import autotuning_within
from tests.card.card import MB, cap


def time_kernel(megabytes: int = 1) -> float:
    """The milliseconds of a kernel that takes some memory, as inductor times it."""
    from torch._inductor.runtime.benchmarking import benchmarker

    return benchmarker.benchmark_gpu(lambda: torch.empty(megabytes * MB, dtype=torch.uint8, device="cuda"))


def test_a_kernel_is_timed_in_a_process_without_room_for_the_cache() -> None:
    whole = torch.cuda.get_device_properties().L2_cache_size
    limit = torch.cuda.memory_reserved() + whole // 2
    cap(limit)
    held = torch.cuda.memory_reserved()
    with autotuning_within(limit):
        assert math.isfinite(time_kernel())
    assert torch.cuda.max_memory_reserved() <= limit
    assert torch.cuda.memory_reserved() == held


def test_with_room_the_cache_is_filled_and_the_memory_returned() -> None:
    cap(2**30)
    held, whole = torch.cuda.memory_reserved(), torch.cuda.get_device_properties().L2_cache_size
    with autotuning_within(2**30):
        time_kernel()
    assert torch.cuda.max_memory_reserved() >= held + whole
    assert torch.cuda.memory_reserved() == held


def test_a_kernel_without_memory_to_be_timed_is_not() -> None:
    cap(torch.cuda.memory_reserved() + 64 * MB)
    with autotuning_within(torch.cuda.memory_reserved() + 64 * MB):
        assert time_kernel(megabytes=512) == math.inf


def test_afterwards_kernels_are_timed_as_before() -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    before = dict(vars(benchmarker))
    with autotuning_within(2**30):
        time_kernel()
    assert vars(benchmarker) == before

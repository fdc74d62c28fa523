"""Starts the libraries whose workspaces a step's account has."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn import functional

from memopt.compat.storages import WeakStorage, weak_storages

_PATIENCE_SECONDS = 1.0


def start_libraries(device: torch.device) -> None:
    """Have cuBLAS and cuBLASLt allocate the workspaces that they keep, on this thread and on autograd's.

    They would otherwise do so at their first call, out of a block that the allocator has cached between two values of
    the step. A large value that had this block would then find none of its size in the next step.

    Free segments go back to the card before, since a workspace within a large one would keep it from being used for
    anything as large again. Nothing but the workspaces is left allocated when this returns. Raises
    `torch.OutOfMemoryError` where they have no room.
    """
    torch.cuda.empty_cache()
    used: list[WeakStorage] = []
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            bias = torch.ones(16, device=device, dtype=dtype, requires_grad=True)
            made = functional.linear(rows, weight, bias)
            gradients = torch.autograd.grad(made, (rows, weight, bias), torch.ones_like(made))
            used += weak_storages((rows, weight, bias, made, *gradients))
            del rows, weight, bias, made, gradients
    _wait_for(used)


def _wait_for(storages: Sequence[WeakStorage]) -> None:
    """Wait until some storages are freed: autograd's thread holds them a moment longer than its caller."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while any(storage.address for storage in storages) and time.monotonic() < end:
        time.sleep(1e-4)

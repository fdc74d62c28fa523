"""Starts the libraries whose workspaces a step's account has."""

from __future__ import annotations

import torch
from torch.nn import functional


def start_libraries(device: torch.device) -> None:
    """On CUDA, have cuBLAS and cuBLASLt allocate the workspaces that they keep, on this thread and on autograd's.

    They would otherwise do so at their first call, out of a block that the allocator has cached between two values of
    the step. A large value that had this block would then find none of its size in the next step.
    """
    if device.type != "cuda":
        return
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            bias = torch.ones(16, device=device, dtype=dtype, requires_grad=True)
            made = functional.linear(rows, weight, bias)
            torch.autograd.grad(made, (rows, weight, bias), torch.ones_like(made))

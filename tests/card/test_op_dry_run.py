"""The blocks that operators in Python are said to allocate, and those that torch's allocator gives them."""

from __future__ import annotations

import pytest
import torch

from memopt.account.card_state import rounded_bytes
from memopt.device.hardware import reported_chip
from memopt.device.op_call import describe
from memopt.device.workspace import op_dry_run
from passes.ops.linear_cross_entropy import with_gradients

MB = 1024**2
"""Smaller blocks have a pool of their own, and are not listed."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_chunked_loss_allocates_as_rehearsed(dtype: torch.dtype, softcap: float) -> None:
    hidden = torch.empty(4096, 1024, dtype=dtype, device="cuda")
    weight = torch.empty(50257, 1024, device="cuda")
    target = torch.zeros(4096, dtype=torch.int64, device="cuda")
    arguments = (hidden, weight, None, target, None, "mean", -100, 0.0, 1.0, softcap, 0, True, True, False, False)
    with_gradients(*arguments)  # libraries allocate their workspaces at the first call
    torch.cuda.memory._record_memory_history(context=None)
    results = with_gradients(*arguments)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.synchronize()
    signs = {"alloc": 1, "free_completed": -1}
    taken = [signs[one["action"]] * rounded_bytes(one["size"]) for one in trace if one["action"] in signs]
    call = describe(torch.ops.memopt.linear_cross_entropy_with_gradients.default, arguments, {}, results)
    dry_run = op_dry_run(call, "cuda", reported_chip(torch.device("cuda")))
    assert dry_run is not None
    planned = [one.bytes if one.allocates else -one.bytes for one in dry_run.calls]
    assert [nbytes for nbytes in planned if abs(nbytes) > MB] == [nbytes for nbytes in taken if abs(nbytes) > MB]

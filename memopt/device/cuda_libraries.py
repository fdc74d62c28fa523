"""CUDA's libraries on this machine's card: the workspaces that cuBLAS keeps, allocated before a step, and the blocks
that cuDNN's operators allocate, found by running them, since cuDNN chooses its algorithm when an operator runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate

import torch
from torch.nn import functional

from memopt.compat.host import MemoryEvents
from memopt.compat.operators import plain_tensors, schema_of
from memopt.compat.tensors import WeakStorage, weak_storages
from memopt.device.hardware import Chip, reported_chip
from memopt.device.live_bytes import NOTABLE, Rehearsal
from memopt.device.op_call import OpCall
from memopt.solver.problem import BlockCall

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


LIBRARY_OPS = frozenset({
    "convolution", "_convolution", "convolution_backward", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
})  # fmt: skip
"""The operators whose workspace cuDNN chooses."""


def is_of_library(call: OpCall) -> bool:
    """Whether a library chooses the workspace of a call."""
    return schema_of(call.op).name.split("::")[-1] in LIBRARY_OPS


def library_run(call: OpCall, chip: Chip) -> Rehearsal | None:
    """The allocator's calls of an operator of a library, which is run once to be seen; None for other operators, where
    this process uses no card with that `chip`, and where the card has no room for the operator now."""
    if not is_of_library(call) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    if reported_chip(device) != chip:
        return None
    cudnn = torch.backends.cudnn
    return _seen(call, device, (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32))


@lru_cache(maxsize=2**12)
def _seen(call: OpCall, device: torch.device, settings: tuple[bool, ...]) -> Rehearsal | None:
    """What a run of the call on the device allocates; `settings` are cuDNN's, which its choice depends on."""
    # Profilers, autocast, dispatch modes and streams belong to a thread: in its own the run sees none of the caller's.
    with ThreadPoolExecutor(1, "memopt-library") as worker:
        events = worker.submit(_events, call, device).result()
    torch.cuda.empty_cache()
    return None if events is None else from_events(events, [spec.bytes for spec in call.outputs])


def _events(call: OpCall, device: torch.device) -> list[int] | None:
    """The bytes that the allocator gives out (and takes back, negative) during a run of the call; None where it fails,
    which it does with an error of torch or of the library."""
    events = MemoryEvents("cuda")
    try:
        with torch.cuda.device(device), plain_tensors(), torch.no_grad():
            args, kwargs = call.make_arguments("cuda")
            call.op(*args, **kwargs)  # the library makes its plan, and initialises itself
            events.start()
            try:
                result = call.op(*args, **kwargs)
                torch.cuda.synchronize()
            finally:
                found = events.stop()
            del result
    except RuntimeError:
        return None
    return found


def from_events(events: Sequence[int], outputs: Sequence[int]) -> Rehearsal:
    """The calls of an operator with results of `outputs` bytes, from the allocator's `events`, which do not name their
    blocks: of several blocks of one size the latest is freed, and the results are what is left."""
    calls: list[BlockCall] = []
    alive: dict[int, int] = {}
    for number, nbytes in enumerate(events):
        block = number if nbytes > 0 else next(one for one in reversed(alive) if alive[one] == -nbytes)
        if nbytes > 0:
            alive[block] = nbytes
        else:
            del alive[block]
        calls.append(BlockCall(nbytes > 0, block, abs(nbytes)))
    peak = max(accumulate(events), default=0)
    return Rehearsal(_numbered(calls, alive, outputs), max(0, peak - sum(alive.values())))


def _numbered(calls: Sequence[BlockCall], left: dict[int, int], outputs: Sequence[int]) -> tuple[BlockCall, ...]:
    """The calls with each result's block numbered by its place among `outputs`, each the smallest that is left and
    large enough; without small blocks of the workspace."""
    place: dict[int, int] = {}
    for at in sorted(range(len(outputs)), key=outputs.__getitem__, reverse=True):
        large = [block for block, nbytes in left.items() if nbytes >= outputs[at] > 0 and block not in place]
        if large:
            place[min(large, key=left.__getitem__)] = at
    numbered = (
        BlockCall(allocates, place.get(block, len(outputs) + block), nbytes)
        for allocates, block, nbytes in calls
        if block in place or (nbytes > NOTABLE and block not in left)
    )
    return tuple(numbered)

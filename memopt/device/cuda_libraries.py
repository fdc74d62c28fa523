"""CUDA's libraries on this machine's card: the workspaces that cuBLAS keeps, allocated before a step, and the blocks of
operators whose kernels have a workspace, found by running them. Rules cannot give these blocks: cuDNN chooses its
algorithm when an operator runs, and where a kernel of torch's own allocates several, a rule only gives their sum."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from memopt.compat.host import MemoryEvents
from memopt.compat.operators import plain_tensors, schema_of
from memopt.compat.tensors import WeakStorage, weak_storages
from memopt.device.hardware import Chip, reported_chip
from memopt.device.live_bytes import NOTABLE, OpDryRun
from memopt.device.op_call import OpCall
from memopt.device.workspace_reductions import REDUCTIONS
from memopt.solver.problem import BlockCall
from passes.compat import in_own_thread

_PATIENCE_SECONDS = 1.0


def start_libraries(device: torch.device) -> None:
    """Make cuBLAS and cuBLASLt allocate the workspaces that they keep, on this thread and on autograd's: at their first
    call within a step they would take a block of torch's allocator that held a large value before. Free segments are
    first returned to the card, since a workspace in a large segment would prevent its reuse. Only the workspaces stay
    allocated. Raises `torch.OutOfMemoryError` where they have no room."""
    torch.cuda.empty_cache()
    used: list[WeakStorage] = []
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), warnings.catch_warnings():
        # The product is the first call that autograd's thread makes on the card.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        for dtype in (torch.float32, torch.bfloat16):
            rows = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
            bias = torch.ones(16, device=device, dtype=dtype, requires_grad=True)
            made = functional.linear(rows, weight, bias)
            gradients = torch.autograd.grad(made, (rows, weight, bias), torch.ones_like(made))
            used += weak_storages((rows, weight, bias, made, *gradients))
            del rows, weight, bias, made, gradients
    end = time.monotonic() + _PATIENCE_SECONDS
    while any(storage.address for storage in used) and time.monotonic() < end:
        time.sleep(1e-4)  # autograd's thread holds them a moment longer than its caller


_OPS = frozenset({
    # cuDNN's
    "convolution", "_convolution", "convolution_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    # Attention: parts of an output in fp32, or of the keys.
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    # Reductions: a buffer, and the counters of its thread blocks in a block of their own.
    *REDUCTIONS.split(),
    # Norms and softmax: sums of each part of the rows, and copies.
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward",
    "native_group_norm", "native_group_norm_backward", "native_batch_norm", "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional", "native_batch_norm_backward", "batch_norm_backward",
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    # Pooling and resizing: copies of operands that are not contiguous.
    "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "max_pool2d_with_indices", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d",
    "upsample_bilinear2d_backward", "upsample_bicubic2d", "upsample_bicubic2d_backward",
})  # fmt: skip
"""Operators whose allocations are found by running them. What they allocate does not depend on the values of their
operands, and they use no operand as an address or index, so they run on tensors that are not filled."""
_ROOM = 64 * 1024**2
"""Bytes by which a free segment is made larger than what a call needs, so that all blocks of the call lie in it."""


def library_run(call: OpCall, chip: Chip) -> OpDryRun | None:
    """The allocations and frees during a run of an operator that has a workspace. None for other operators, where this
    process uses no card with that `chip`, and where the card has no room for the operator now."""
    if call.name not in _OPS or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    if reported_chip(device) != chip:
        return None
    cudnn = torch.backends.cudnn
    return _seen(call, device, (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32))


@lru_cache(maxsize=2**12)
def _seen(call: OpCall, device: torch.device, settings: tuple[bool, ...]) -> OpDryRun | None:
    """The call's allocations in a run, None where it fails; `settings` are cuDNN's flags, by which it chooses."""
    events = in_own_thread(_events, call, device)
    torch.cuda.empty_cache()
    return None if events is None else from_events(events, [spec.bytes for spec in call.outputs])


def _events(call: OpCall, device: torch.device) -> list[int] | None:
    """The bytes of each block that the allocator gives out (or takes back, negative) during a run of the call, in
    order; None where the run fails with an error of torch or of the library."""
    try:
        # Attention with dropout draws random numbers, which are the user's.
        rng = torch.random.fork_rng([device])
        with torch.cuda.device(device), plain_tensors(), torch.no_grad(), rng:
            args, kwargs = call.make_arguments("cuda")
            if schema_of(call.op).name in _SEEDED_FROM_HOST:
                args = list(map(_seed_on_host, args))
            first = _recorded(call, args, kwargs)  # the library makes its plan, and initialises itself
            torch.cuda.empty_cache()
            # In one large segment all blocks have the bytes that were asked for: a rest of up to 1 MB is not split off.
            room = torch.empty(max(accumulate(first), default=0) + _ROOM, dtype=torch.uint8, device=device)
            del room
            return _recorded(call, args, kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


_SEEDED_FROM_HOST = frozenset({"aten::_scaled_dot_product_efficient_attention_backward"})
"""Operators that read the seed and the offset of their random numbers on the host, where their forwards have put them.
Given tensors on the card there, they would end the process."""


def _seed_on_host(argument: Any) -> Any:
    """The argument; if it is a seed or an offset (a 0-dimensional integer tensor), a zero on the host."""
    is_seed = isinstance(argument, torch.Tensor) and argument.dim() == 0 and not argument.is_floating_point()
    return argument.cpu().zero_() if is_seed else argument


def _recorded(call: OpCall, args: Any, kwargs: Any) -> list[int]:
    """The bytes of each block that a run of the call allocates, and minus those of each that it frees, in order."""
    events = MemoryEvents("cuda")
    events.start()
    try:
        result = call.op(*args, **kwargs)
        torch.cuda.synchronize()
    finally:
        found = events.stop()
    del result
    return found


def from_events(events: Sequence[int], outputs: Sequence[int]) -> OpDryRun:
    """The allocations and frees of an operator, from the bytes of each in order, negative for a free of the latest of
    several blocks of one size. `outputs` has the bytes of the results, among the blocks that are left."""
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
    return OpDryRun(_numbered(calls, alive, outputs), max(0, peak - sum(alive.values())))


def _numbered(calls: Sequence[BlockCall], left: dict[int, int], outputs: Sequence[int]) -> tuple[BlockCall, ...]:
    """The calls with new numbers of blocks. Each result, of `outputs` bytes, is the smallest block among those that are
    `left` after the run and large enough, and that block gets the result's position as its number. Blocks of the
    workspace are numbered after the results; small ones (`NOTABLE`) are left out."""
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

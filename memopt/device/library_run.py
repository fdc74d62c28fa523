"""The blocks that operators of CUDA's libraries allocate, found by running them on this machine's card: cuDNN chooses
its algorithm, and with it the workspace, when an operator runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate

import torch

from memopt.compat.dispatch import plain_tensors
from memopt.compat.operators import schema_of
from memopt.compat.profiler import MemoryEvents
from memopt.device.cuda_cards import reported_chip
from memopt.device.hardware import Chip
from memopt.device.op_call import OpCall
from memopt.device.op_rehearsal import NOTABLE, Rehearsal
from memopt.solver.problem import BlockCall

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

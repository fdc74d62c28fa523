"""Workspace of operators: the temporary bytes that a kernel holds beside its inputs and its results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from memopt.compat.host import HOST, MemoryEvents
from memopt.compat.operators import OpOverload, kernels_as_in_eager_mode, plain_tensors, takes_unknown_bytes
from memopt.compat.tensors import storages_of
from memopt.device.devices import device_of
from memopt.device.hardware import LARGE, Chip
from memopt.device.live_bytes import OpDryRun, dry_run_op
from memopt.device.op_call import OpCall, flop_formula, op_call, tensors_in
from memopt.device.workspace_rules import SCALARS
from memopt.lru import LruCache
from passes.compat import in_own_thread
from passes.ops.fp8_formats import DELAYED_SCALE

MAX_RUN_BYTES = 256 * 1024**2
MAX_RUN_FLOPS = 20 * 10**9
"""An op whose tensors or arithmetic are larger is not run to find its price, since that would take too long."""

_CHEAP_SECONDS = 0.005
_TIMED_RUNS = 3
COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_dtensor", "symm_mem")
"""The namespaces of operators whose kernels talk to other processes."""
_CHECKING = ("aten", "prims", "memopt", *COLLECTIVES)
"""The namespaces of operators that check the indices in their operands."""
_INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Measured:
    """The bytes and the seconds of an operator call, measured by running it or, where it is not run, estimated."""

    workspace_bytes: int
    """The most bytes allocated at once while it ran, less `output_bytes`."""
    output_bytes: int | None
    """Bytes of the storages that it made and returned, without views of its inputs; None if it was not run."""
    seconds: float | None
    """Seconds of a run on this machine's CPU, the median of three more runs if the first is short; None if not run."""


def measure_workspaces(nodes: Iterable[fx.Node]) -> dict[fx.Node, _Measured]:
    """The measured workspace bytes, result bytes and seconds of each node's call. Every distinct call runs once on the
    CPU, on made-up tensors of the same shapes; the results are cached in this process, and the global random state does
    not change. A call that is too large to run, or cannot run on made-up values, gets an estimated workspace; its
    result bytes and seconds are None. A node that calls no operator gets no workspace, and None for both."""
    calls = {node: op_call(node) for node in nodes}
    found = _measured(call for call in calls.values() if call is not None)
    return {node: _NOTHING if call is None else found[call] for node, call in calls.items()}


def call_workspace_bytes(call: OpCall, device_type: str, chip: Chip = LARGE) -> int:
    """Temporary bytes that the kernel of a call holds beyond its inputs and outputs: on the host measured by running
    the op where that is cheap, on a card ("cuda") estimated, for its `chip`."""
    device = device_of(device_type)
    return _measured([call])[call].workspace_bytes if device.is_host else device.workspace(call, chip)


def known_workspace_bytes(call: OpCall, device_type: str) -> int | None:
    """Temporary bytes of a call's kernel, found without running it; None where a run would be needed."""
    device = device_of(device_type)
    if not device.is_host:
        return device.workspace(call, LARGE)
    measured = _latest.get(_key(call))
    return None if measured is None else measured.workspace_bytes


def estimate_workspace(call: OpCall, device_type: str, chip: Chip = LARGE) -> int:
    """An upper bound, from a rule, on the temporary bytes that the kernel of a call holds on a device of this type."""
    return device_of(device_type).workspace(call, chip)


@lru_cache(maxsize=256)
def op_dry_run(call: OpCall, device_type: str, chip: Chip) -> OpDryRun | None:
    """The allocations, frees and workspace of an operator whose kernel is written in Python, on a card with that
    `chip`, found by running it on tensors without memory. None for other operators."""
    device = device_of(device_type)
    return dry_run_op(call, partial(device.workspace, chip=chip), device.block_bytes, device="meta")


def eager_workspace_bytes(call: OpCall, device_type: str, spare_bytes: int) -> int:
    """Temporary bytes of the kernel of a call in eager mode: an upper bound from a rule. On the CPU, where that bound
    exceeds `spare_bytes` (the bytes left below a peak), the kernel is run and measured instead."""
    bound = estimate_workspace(call, device_type)
    if device_of(device_type).is_host and bound > max(SCALARS, spare_bytes):
        return call_workspace_bytes(call, device_type)
    return bound


def _measured(calls: Iterable[OpCall]) -> dict[OpCall, _Measured]:
    """The result of each distinct call: kept from before, or measured now."""
    found = {call: _latest.get(_key(call)) for call in calls}
    fresh = [call for call, result in found.items() if result is None]
    if fresh:
        for call, result in in_own_thread(_measure_all, fresh, torch.get_num_threads()).items():
            found[call] = result
            _latest[_key(call)] = result
    return {call: result for call, result in found.items() if result is not None}


_NOTHING = _Measured(0, None, None)
# A model has a few thousand distinct calls at most; a result and its key take about a kilobyte.
_latest: LruCache[tuple[OpCall, int], _Measured] = LruCache(2**15)


def _key(call: OpCall) -> tuple[OpCall, int]:
    return call, torch.get_num_threads()  # kernels hold buffers per thread


def _measure_all(fresh: Iterable[OpCall], threads: int) -> dict[OpCall, _Measured]:
    # oneDNN sizes its buffers by OpenMP's number of threads, which belongs to a thread and is not what torch reports.
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return {call: _price(call) for call in fresh}


def _price(call: OpCall) -> _Measured:
    """The call measured where that is cheap, and estimated otherwise."""
    measured = _measure(call) if _is_cheap(call) else None
    return measured or _Measured(_estimate(call), None, None)


def _estimate(call: OpCall) -> int:
    """The bytes of the workspace by rule; for an operator written in Python at most what its operators hold."""
    nbytes = device_of(HOST).workspace(call)
    dry_run = dry_run_op(call, _kernel_bytes)
    return nbytes if dry_run is None else min(nbytes, dry_run.workspace_bytes)


def _kernel_bytes(call: OpCall) -> int:
    """The bytes of the workspace of a call within an operator. It works on a part of that operator's rows, so it may be
    cheap to measure where the operator is not."""
    result = _latest.get(_key(call))
    if result is None:
        with plain_tensors():  # the operator runs on fake tensors, its kernels run on real ones
            result = _price(call)
        _latest[_key(call)] = result
    return result.workspace_bytes


def _measure(call: OpCall) -> _Measured | None:
    """Run the call on the CPU and meter it; None where it does not run on made-up values."""
    args, kwargs = call.make_arguments(HOST.type)
    try:
        _, peak_bytes, output_bytes, seconds = _metered(call.op, args, kwargs)
    except Exception:  # a kernel in Python may raise anything
        return None  # as for a singular matrix, or an index that must not be 0
    if seconds < _CHEAP_SECONDS:
        seconds = statistics.median(_time(call.op, args, kwargs) for _ in range(_TIMED_RUNS))
    return _Measured(max(0, peak_bytes - output_bytes), output_bytes, seconds)


def _metered(op: OpOverload, args: Any, kwargs: Any) -> tuple[Any, int, int, float]:
    """The results of an operator on tensors of the CPU, the most bytes that were allocated while it ran, the bytes of
    the storages among them that its results have, and its seconds."""
    inputs = {storage.data_ptr() for one in tensors_in((args, list(kwargs.values()))) for storage in storages_of(one)}
    events = MemoryEvents()
    events.start()
    begin = time.perf_counter()
    try:
        results = op(*args, **kwargs)
        seconds = time.perf_counter() - begin
    finally:
        recorded = events.stop()
    made = {storage.data_ptr(): storage.nbytes() for one in tensors_in(results) for storage in storages_of(one)}
    output_bytes = sum(nbytes for address, nbytes in made.items() if address not in inputs)
    return results, max(accumulate(recorded), default=0), output_bytes, seconds


def run_metered(op: OpOverload, args: Any, kwargs: Any) -> tuple[Any, int]:
    """Run an operator on CPU tensors, inside a dispatch mode; return its results, and the bytes of its workspace. For
    operands that an `OpCall` cannot describe, such as sparse ones."""
    keys = kernels_as_in_eager_mode()  # of this thread, which is below autograd

    def run(threads: int) -> tuple[Any, int, int, float]:
        torch.set_num_threads(threads)
        with keys:
            return _metered(op, args, kwargs)

    results, peak_bytes, output_bytes, _ = in_own_thread(run, torch.get_num_threads())
    return results, max(0, peak_bytes - output_bytes)


def _time(op: OpOverload, args: Any, kwargs: Any) -> float:
    begin = time.perf_counter()
    op(*args, **kwargs)
    return time.perf_counter() - begin


def _is_cheap(call: OpCall) -> bool:
    """Whether the call may be run to measure it: it is small, and reaches no other device or process. It must not read
    or write beyond its tensors either, as kernels of other libraries may do if indices are made up."""
    values = (*call.args, *(value for _, value in call.kwargs))
    elsewhere = any(value.type != HOST.type for value in values if isinstance(value, torch.device))
    if call.op.namespace in COLLECTIVES or call.op is DELAYED_SCALE or elsewhere:
        return False
    if call.op.namespace not in _CHECKING and any(spec.dtype in _INDICES for spec in call.inputs):
        return False
    if takes_unknown_bytes(call.op) and any(spec.bytes == 0 for spec in call.inputs):
        return False  # its kernel would read beyond a buffer that a fake forward returned
    if sum(spec.bytes for spec in (*set(call.inputs), *call.outputs)) > MAX_RUN_BYTES:
        return False
    formula = flop_formula(call.op)
    if formula is None:
        return True
    args, kwargs = call.make_arguments("meta")
    return int(formula(*args, **kwargs, out_val=call.make_results("meta"))) <= MAX_RUN_FLOPS

"""Workspace of operators: the temporary bytes that a kernel holds beside what it reads and what it returns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from memopt.compat.operators import OpOverload
from memopt.compat.profiler import CpuMemoryEvents
from memopt.device.op_call import OpCall, op_call, tensors_in
from memopt.device.workspace_table import estimate_workspace
from passes.ops.fp8_history import DELAYED_SCALE

MAX_RUN_BYTES = 256 * 1024**2
MAX_RUN_FLOPS = 20 * 10**9
"""An op that holds or computes more is not run for its price: it would cost more than a step may."""

_CHEAP_SECONDS = 0.005
_TIMED_RUNS = 3
# Their kernels talk to other processes.
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_dtensor", "symm_mem")


@dataclass(frozen=True)
class Measured:
    """What an op costs beside the bytes of its inputs."""

    workspace_bytes: int
    """Highest sum of its allocations, less `output_bytes`."""
    output_bytes: int | None
    """Bytes of the storages that it made and returned, views of its inputs left out; None if it was not run."""
    seconds: float | None
    """Time of a run on this machine's CPU, the median of three after a first one if that is short; None if not run."""


def workspace_bytes(node: fx.Node, device_type: str) -> int:
    """Temporary bytes that the node's kernel holds beyond its inputs and outputs.

    Args:
        node: a node of an ATen graph with `meta["val"]` on itself and its arguments.
        device_type: "cpu" (measured by running the op where that is cheap) or "cuda" (estimated).
    """
    if device_type == "cpu":
        return measure_workspaces([node])[node].workspace_bytes
    call = op_call(node)
    return 0 if call is None else estimate_workspace(call, device_type)


def measure_workspaces(nodes: Iterable[fx.Node]) -> dict[fx.Node, Measured]:
    """Run every distinct call among the nodes once on the CPU, on tensors of the same shapes, and meter it.

    Results are kept for the life of the process. The global random state stays as it was. What is too large to run,
    or cannot be run on made-up values, is estimated (`output_bytes` and `seconds` are None then).
    """
    calls = {node: op_call(node) for node in nodes}
    _measure_fresh(call for call in calls.values() if call is not None)
    return {node: _NOTHING if call is None else _known[_key(call)] for node, call in calls.items()}


def call_workspace_bytes(call: OpCall, device_type: str) -> int:
    """Temporary bytes of a call's kernel: `workspace_bytes` for what is no node of a graph."""
    if device_type != "cpu":
        return estimate_workspace(call, device_type)
    _measure_fresh([call])
    return _known[_key(call)].workspace_bytes


def _measure_fresh(calls: Iterable[OpCall]) -> None:
    """Measure the calls that are not known yet."""
    fresh = dict.fromkeys(call for call in calls if _key(call) not in _known)
    if fresh:
        # Profilers, autocast and dispatch modes belong to a thread: in one of our own, whatever is active in the
        # caller's (a meter around the first step, the fake mode of a compiler) neither disturbs us nor is disturbed.
        with ThreadPoolExecutor(1, "memopt-workspace") as worker:
            worker.submit(_measure_all, fresh, torch.get_num_threads()).result()


_NOTHING = Measured(0, None, None)
_known: dict[tuple[OpCall, int], Measured] = {}


def _key(call: OpCall) -> tuple[OpCall, int]:
    return call, torch.get_num_threads()  # kernels hold buffers per thread


def _measure_all(fresh: Iterable[OpCall], threads: int) -> None:
    # OpenMP's number, which oneDNN sizes its buffers by, belongs to a thread too, and is not what torch reports.
    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for call in fresh:
            measured = _measure(call) if _is_cheap(call) else None
            _known[_key(call)] = measured or Measured(estimate_workspace(call, "cpu"), None, None)


def _measure(call: OpCall) -> Measured | None:
    args, kwargs = call.make_arguments("cpu")
    inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, list(kwargs.values())))}
    events = CpuMemoryEvents()
    events.start()
    begin = time.perf_counter()
    try:
        results = call.op(*args, **kwargs)
        seconds = time.perf_counter() - begin
        made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(results)}
        del results
    except Exception:  # a kernel in Python may raise anything
        return None  # made-up values do not suit it (a singular matrix, an index that must not be 0)
    finally:
        recorded = events.stop()
    output_bytes = sum(nbytes for address, nbytes in made.items() if address not in inputs)
    peak_bytes = max(accumulate(recorded), default=0)
    if seconds < _CHEAP_SECONDS:
        seconds = statistics.median(_time(call.op, args, kwargs) for _ in range(_TIMED_RUNS))
    return Measured(max(0, peak_bytes - output_bytes), output_bytes, seconds)


def _time(op: OpOverload, args: Any, kwargs: Any) -> float:
    begin = time.perf_counter()
    op(*args, **kwargs)
    return time.perf_counter() - begin


def _is_cheap(call: OpCall) -> bool:
    values = (*call.args, *(value for _, value in call.kwargs))
    elsewhere = any(value.type != "cpu" for value in values if isinstance(value, torch.device))
    if call.op.namespace in _COLLECTIVES or call.op is DELAYED_SCALE or elsewhere:
        return False
    if sum(spec.bytes for spec in (*set(call.inputs), *call.outputs)) > MAX_RUN_BYTES:
        return False
    count = flop_registry.get(call.op.overloadpacket)
    if count is None:
        return True
    args, kwargs = call.make_arguments("meta")
    return int(count(*args, **kwargs, out_val=call.make_results("meta"))) <= MAX_RUN_FLOPS

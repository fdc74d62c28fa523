"""Times the operators that make up most of a step, on the device itself, each by itself on random values."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from memopt.device.op_call import OpCall, tensors_in

LIMIT_SECONDS = 4.0
"""What timing the operators of one step may take in all."""
_SHARE = 0.97
_ROUNDS = 8
_ROUND_SECONDS = 0.002
_RUNS, _RUNS_SECONDS = 12, 0.2
_OTHER_BYTES = 4 * 1024**2
# Their kernels are our own, or talk to other processes.
_ALONE = ("aten", "prims")


def dominant_calls(seconds: Mapping[OpCall, float], share: float = _SHARE) -> tuple[OpCall, ...]:
    """The fewest calls that make up `share` of all seconds, the longest first."""
    left = share * sum(seconds.values())
    found = []
    for call in sorted(seconds, key=lambda each: -seconds[each]):
        if left <= 0:
            break
        found.append(call)
        left -= seconds[call]
    return tuple(found)


def time_calls(
    calls: Mapping[OpCall, float], device: torch.device, limit_seconds: float = LIMIT_SECONDS
) -> dict[OpCall, float]:
    """Seconds of one run of each call on `device`, in the order given, with what they are expected to take.

    A kernel that is shorter than its launch counts as long as that. Calls that cannot run by themselves (operators of
    other libraries, collectives, values that do not suit), that do not fit into half of the free memory, or that come
    after `limit_seconds` are left out. Random states stay as they were.
    """
    # In a thread of our own, whatever modes and autocast are active in the caller's: see `measure_workspaces`.
    with ThreadPoolExecutor(1, "memopt-time") as worker:
        return worker.submit(_time_all, calls, device, limit_seconds, torch.get_num_threads()).result()


def call_key(call: OpCall) -> str:
    """The call as text, the same in every process."""
    return f"{call.op} {call.args} {call.kwargs}"


def _time_all(
    calls: Mapping[OpCall, float], device: torch.device, limit_seconds: float, threads: int
) -> dict[OpCall, float]:
    torch.set_num_threads(threads)
    end = time.perf_counter() + limit_seconds
    devices = [device] if device.type == "cuda" else []
    found = {}
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for call, expected in calls.items():
            if call.op.namespace not in _ALONE or time.perf_counter() + 2 * expected > end or not _fits(call, device):
                continue
            try:
                found[call] = _seconds(call, device)
            except Exception:  # a kernel may refuse made-up values in any way, or the card be too full
                continue
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was tried is no part of the step's memory
    return found


def _seconds(call: OpCall, device: torch.device) -> float:
    """That of the fastest of several rounds of runs: what else the machine does can only add."""
    args, kwargs = call.make_arguments(str(device))
    _randomize(args, kwargs)

    if device.type == "cpu":
        return _alone(lambda: call.op(*args, **kwargs))

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call.op(*args, **kwargs)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / times

    run(1)
    first = run(1)
    times = max(1, int(_ROUND_SECONDS / max(first, 1e-6)))
    rounds = _ROUNDS if first < 5 * _ROUND_SECONDS else 2
    return min(run(times) for _ in range(rounds))


def _alone(run: Callable[[], object]) -> float:
    """The median seconds of single runs on the CPU, each after memory like that of other operators was touched: one
    right after the other they would find all that they read in the nearest cache, as no operator of a step does.

    Of a step's results about half, those that are kept for the backward, are written to pages that the system gives
    anew, since most of a step's memory goes back to it at the end, and the others where something has just been freed:
    the mean of the medians of both is returned.
    """
    other = torch.ones(_OTHER_BYTES // 4)
    # A single thread's own time: other work on the machine does not count in it.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    anew: list[float] = []
    again: list[float] = []
    for number in range(_RUNS):
        other.mul_(1.0)
        if number % 2 == 0:
            _give_back_free_memory()
        begin = clock()
        result = run()
        (again if number % 2 else anew).append(clock() - begin)
        del result
        if again and sum(anew) + sum(again) > _RUNS_SECONDS:
            break
    return max(1e-9, (statistics.median(anew) + statistics.median(again)) / 2)


def _give_back_free_memory() -> None:
    """By glibc's `malloc_trim`; other C libraries keep what they keep."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@functools.cache
def _c_library() -> Any:
    try:
        return ctypes.CDLL(None)
    except OSError:
        return None


def _randomize(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Numbers are drawn, since constant ones take less power and go faster; indices are valid in any dimension."""
    tensors = list(tensors_in((args, list(kwargs.values()))))
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    bound = min((size for tensor in numbers for size in tensor.shape if size > 0), default=1)
    for tensor in tensors:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            whole.normal_()
        elif tensor.dtype in (torch.int32, torch.int64) and tensor.dim() > 0:
            whole.copy_(torch.arange(whole.numel(), device=tensor.device) % bound)


def _fits(call: OpCall, device: torch.device) -> bool:
    held = sum(spec.bytes for spec in (*call.inputs, *call.outputs))
    return held <= (torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2 * 1024**3)

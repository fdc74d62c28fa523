"""Times the operators that make up most of a step, one by one, on the device and on random values."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memopt.device.devices import device_of
from memopt.device.op_call import OpCall, tensors_in
from passes.compat import in_own_thread

LIMIT_SECONDS = 4.0
"""The most seconds that timing the operators of one step takes."""
_SHARE = 0.97
_ROUNDS = 8
_ROUND_SECONDS = 0.002
_RUNS, _RUNS_SECONDS = 12, 0.2
_OTHER_BYTES = 4 * 1024**2
# The namespaces of operators that can be run by themselves: no custom ones, none that talk to other processes.
_ALONE = ("aten", "prims")


def dominant_calls(seconds: Mapping[OpCall, float], share: float = _SHARE) -> tuple[OpCall, ...]:
    """The fewest calls whose `seconds` add up to `share` of the total, the longest first."""
    left = share * sum(seconds.values())
    found = []
    for call in sorted(seconds, key=lambda timed: -seconds[timed]):
        if left <= 0:
            break
        found.append(call)
        left -= seconds[call]
    return tuple(found)


def time_calls(
    calls: Mapping[OpCall, float], device: torch.device, limit_seconds: float = LIMIT_SECONDS
) -> dict[OpCall, float]:
    """Seconds of one run of each call on `device`, in the order of `calls`, which maps each call to the seconds that it
    is expected to take. A kernel that is shorter than its launch counts as long as the launch. Left out are calls that
    cannot run by themselves (operators of other libraries, collectives, operators that refuse made-up values), that do
    not fit into half of a GPU's free memory or 2 GB on the CPU, or that are expected to end after `limit_seconds` if
    they run twice. Random states are restored."""
    return in_own_thread(_time_all, calls, device, limit_seconds, torch.get_num_threads())


def call_key(call: OpCall) -> str:
    """The call as text, equal in every process, to be its key on disk."""
    return f"{call.op} {call.args} {call.kwargs}"


def _time_all(
    calls: Mapping[OpCall, float], device: torch.device, limit_seconds: float, threads: int
) -> dict[OpCall, float]:
    torch.set_num_threads(threads)
    end = time.perf_counter() + limit_seconds
    kind = device_of(device)
    devices = [] if kind.is_host else [device]
    found = {}
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for call, expected in calls.items():
            if call.op.namespace not in _ALONE or time.perf_counter() + 2 * expected > end or not _fits(call, device):
                continue
            try:
                found[call] = _seconds(call, device)
            except Exception:  # a kernel may refuse made-up values with any error, or the card may be full
                continue
    kind.empty_cache()  # the memory of these runs is no part of the step's
    return found


def _seconds(call: OpCall, device: torch.device) -> float:
    """Seconds of one run, from the fastest of several rounds: other work on the machine can only add."""
    args, kwargs = call.make_arguments(str(device))
    _randomize(args, kwargs)

    kind = device_of(device)
    if kind.is_host:
        return _alone(lambda: call.op(*args, **kwargs))

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call.op(*args, **kwargs)
        kind.synchronize(device)
        return (time.perf_counter() - begin) / times

    run(1)
    first = run(1)
    times = max(1, int(_ROUND_SECONDS / max(first, 1e-6)))
    rounds = _ROUNDS if first < 5 * _ROUND_SECONDS else 2
    return min(run(times) for _ in range(rounds))


def _alone(run: Callable[[], object]) -> float:
    """The seconds of a run on the CPU, from single runs with other memory touched in between: no operator of a step
    finds its inputs in the nearest cache. About half of a step's results, those saved for the backward, are written to
    pages fresh from the system, the others where memory has just been freed: half of the runs are timed with each kind
    of memory, and the mean of both medians is returned."""
    other = torch.ones(_OTHER_BYTES // 4)
    # A single thread's own time does not count other work on the machine.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    fresh: list[float] = []
    reused: list[float] = []
    for number in range(_RUNS):
        other.mul_(1.0)
        if number % 2 == 0:
            _give_back_free_memory()
        begin = clock()
        result = run()
        (reused if number % 2 else fresh).append(clock() - begin)
        del result
        if reused and sum(fresh) + sum(reused) > _RUNS_SECONDS:
            break
    return max(1e-9, (statistics.median(fresh) + statistics.median(reused)) / 2)


def _give_back_free_memory() -> None:
    """Return freed memory to the system, by glibc's `malloc_trim`; other C libraries have nothing like it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _randomize(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Fill the tensors with random numbers, since kernels run faster on constants, and with indices that are valid in
    any dimension."""
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
    """Whether the tensors of the call take at most half of the free memory of a GPU, or 2 GB on the CPU."""
    held, kind = sum(spec.bytes for spec in (*call.inputs, *call.outputs)), device_of(device)
    if kind.is_host:
        return held <= 2 * 1024**3
    return held <= ((kind.free_bytes(device) or 0) - kind.cached_bytes(device)) // 2

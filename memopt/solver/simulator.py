"""Simulates a schedule: live bytes at each evaluation, seconds, and transfers. It alone decides whether a schedule
fits.

It shares no code with the solvers on purpose, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from memopt.solver.problem import Link, Offload, RematProblem, Schedule

Thing = TypeVar("Thing")
Span = tuple[float, float]
"""Seconds from the start of the step at which something begins and is done."""


@dataclass(frozen=True)
class _TimeLine:
    """When each evaluation and each transfer of a schedule runs, in seconds from its start."""

    starts: tuple[float, ...]
    """The start of each evaluation, after what it waits for."""
    out: tuple[Span, ...]
    """The copy to the host of each offload, in the order of `Schedule.offloads`."""
    back: tuple[Span, ...]
    """The copy from the host of each offload."""
    stall_seconds: float
    """Seconds for which compute waits for transfers; infinite if it waits for a link without bandwidth."""


def time_line(problem: RematProblem, schedule: Schedule, link: Link) -> _TimeLine:
    """The times of all evaluations and transfers of a schedule.

    Before an evaluation, compute waits for the copies out whose memory is freed there (`Offload.freed_before`), then
    issues copies back (`fetch_from`), then waits for those that are read from there on (`back_before`). After the
    evaluation, it issues copies out (`out_after`). Copies out and copies back are two queues; each moves one storage at
    a time in the order of issue. Of copies issued at one position the one that is waited for first goes first. Storages
    that lie on the host for the whole step (`Storage.home`) are only copied back.
    """
    offloads = schedule.offloads
    seconds = [link.transfer_seconds(problem.storages[offload.storage].bytes) for offload in offloads]
    numbers = range(len(offloads))
    outward = sorted(numbers, key=lambda i: (offloads[i].out_after, offloads[i].freed_before, i))
    fetched = sorted(numbers, key=lambda i: (offloads[i].fetch_from, offloads[i].back_before, i))
    frees = by_position((offloads[i].freed_before, i) for i in outward)
    issues = by_position((offloads[i].out_after, i) for i in outward)
    fetches = by_position((offloads[i].fetch_from, i) for i in fetched)
    needs = by_position((offloads[i].back_before, i) for i in fetched)
    out, back = [(0.0, 0.0)] * len(offloads), [(0.0, 0.0)] * len(offloads)
    starts: list[float] = []
    now = out_free = back_free = stalls = 0.0
    for position, op in enumerate(schedule.evaluations):
        start = now
        for i in frees.get(position, ()):
            now = max(now, out[i][1])
        for i in fetches.get(position, ()):
            begins = max(back_free, now)
            back_free = begins + seconds[i]
            back[i] = begins, back_free
        for i in needs.get(position, ()):
            now = max(now, back[i][1])
        stalls += now - start if now > start else 0.0  # inf - inf would be NaN
        starts.append(now)
        now += problem.ops[op].seconds
        for i in issues.get(position, ()):
            if problem.storages[offloads[i].storage].home:
                out[i] = now, now
                continue
            begins = max(out_free, now)
            out_free = begins + seconds[i]
            out[i] = begins, out_free
    return _TimeLine(tuple(starts), tuple(out), tuple(back), stalls)


@dataclass(frozen=True)
class Simulation:
    """The bytes and seconds that a schedule takes, by simulation. Positions count evaluations from 0."""

    peak_bytes: int
    peak_position: int
    """The first evaluation at which the peak is reached; -1 for an empty schedule."""
    seconds: float
    """Seconds of all evaluations and of all waits for transfers."""
    added_seconds: float
    """Seconds of all recomputations and of all waits for transfers."""
    live_bytes: npt.NDArray[np.int64]
    """Per evaluation: resident bytes, every live version, the storages that the op makes, and its workspace."""
    stall_seconds: float = 0.0
    """Seconds for which compute waits for transfers."""
    host_bytes: int = 0
    """The most bytes on the host at any position."""


def simulate(problem: RematProblem, schedule: Schedule, link: Link | None = None) -> Simulation:
    """Count the live bytes at each evaluation of `schedule`, and its seconds; `link` carries the offloaded storages.

    Each evaluation of a storage's producer, and each copy back from the host, makes a new version of the storage. A
    read is of the latest version. A version is live from its making to its last read, or only at its making if nothing
    reads it; the first version of a `Storage.kept` storage is live to the end. A version that is copied out is live
    until `Offload.freed_before` at least, the fetched copy from `fetch_from` on.

    Raises `ValueError` if the schedule is invalid (`Schedule.check`), offloads without a link, or puts more on the host
    than `link.host_bytes`."""
    schedule.check(problem)
    evaluations = schedule.evaluations
    if not evaluations:
        return Simulation(problem.resident_bytes, -1, 0.0, 0.0, np.zeros(0, np.int64))
    change = np.zeros(len(evaluations) + 1, np.int64)
    for storage, born, dies in lifetimes(problem, evaluations, schedule.offloads):
        change[born] += problem.storages[storage].bytes
        change[dies + 1] -= problem.storages[storage].bytes
    workspace = np.array([problem.ops[op].workspace_bytes for op in evaluations], np.int64)
    live = problem.resident_bytes + np.cumsum(change[:-1]) + workspace
    stalls, host = _offloading(problem, schedule, link)
    seconds = sum(problem.ops[op].seconds for op in evaluations) + stalls
    added_seconds = schedule.added_seconds(problem) + stalls
    peak_position = int(np.argmax(live))
    return Simulation(int(live[peak_position]), peak_position, seconds, added_seconds, live, stalls, host)


def lifetimes(problem: RematProblem, evaluations: tuple[int, ...], offloads: tuple[Offload, ...]) -> list[list[int]]:
    """Every version of every storage (see `simulate`) as [storage, position of its making, last live position]."""
    versions: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    outward = by_position((offload.out_after, offload) for offload in offloads)
    back = by_position((offload.back_before, offload) for offload in offloads)
    end = len(evaluations) - 1
    for position, index in enumerate(evaluations):
        op = problem.ops[index]
        for offload in back.get(position, ()):
            latest[offload.storage] = [offload.storage, offload.fetch_from, position]
            versions.append(latest[offload.storage])
        for storage in op.reads:
            latest[storage][2] = max(latest[storage][2], position)
        for storage in op.makes:
            keeps = problem.storages[storage].kept and storage not in latest
            latest[storage] = [storage, position, end if keeps else position]
            versions.append(latest[storage])
        for offload in outward.get(position, ()):
            latest[offload.storage][2] = max(latest[offload.storage][2], offload.freed_before - 1)
    return versions


def by_position(pairs: Iterable[tuple[int, Thing]]) -> dict[int, list[Thing]]:
    """The things of `pairs` (position, thing) in lists by position, each list in the order of `pairs`."""
    grouped: dict[int, list[Thing]] = {}
    for position, thing in pairs:
        grouped.setdefault(position, []).append(thing)
    return grouped


def _offloading(problem: RematProblem, schedule: Schedule, link: Link | None) -> tuple[float, int]:
    """Seconds for which compute waits, and the most bytes on the host; an offload counts from `out_after` on."""
    if not schedule.offloads:
        return 0.0, problem.home_bytes
    if link is None:
        raise ValueError(f"the schedule has {len(schedule.offloads)} offloads: pass the link to the host, as link=")
    change = np.zeros(len(schedule.evaluations) + 1, np.int64)
    for offload in schedule.offloads:
        if not problem.storages[offload.storage].home:
            change[offload.out_after] += problem.storages[offload.storage].bytes
            change[offload.back_before] -= problem.storages[offload.storage].bytes
    host_bytes = int(np.cumsum(change).max()) + problem.home_bytes
    if link.host_bytes is not None and host_bytes > link.host_bytes:
        raise ValueError(f"the schedule holds {host_bytes} bytes on the host, which has room for {link.host_bytes}")
    return time_line(problem, schedule, link).stall_seconds, host_bytes

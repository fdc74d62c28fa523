"""Simulates a schedule: live bytes at each evaluation, and seconds. It alone decides whether a schedule fits.

It shares no code with the solvers on purpose, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.solver.problem import Link, RematProblem
from memopt.solver.schedule import Offload, Schedule
from memopt.solver.time_line import stall_seconds


@dataclass(frozen=True)
class Simulation:
    """The measured cost of a schedule. Positions count evaluations from 0."""

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

    A read binds to the latest evaluation of the storage's producer, or to a copy fetched since. A version is live up to
    its last read, or at its making only if nothing reads it; the first version of a kept storage is live to the end.
    A version that is copied out is live until `Offload.freed_before`, the fetched copy from `fetch_from` on.

    Raises `ValueError` if the schedule is invalid (`Schedule.check`), offloads without a link, or puts more on the
    host than `link.host_bytes`.
    """
    schedule.check(problem)
    evaluations = schedule.evaluations
    if not evaluations:
        return Simulation(problem.resident_bytes, -1, 0.0, 0.0, np.zeros(0, np.int64))
    change = np.zeros(len(evaluations) + 1, np.int64)
    transient = np.zeros(len(evaluations), np.int64)
    for storage, born, dies in lifetimes(problem, evaluations, schedule.offloads):
        change[born] += problem.storages[storage].bytes
        change[dies + 1] -= problem.storages[storage].bytes
    for position, op in enumerate(evaluations):
        transient[position] = problem.ops[op].workspace_bytes
    live = problem.resident_bytes + np.cumsum(change[:-1]) + transient
    stalls, host = _offloading(problem, schedule, link)
    seconds = sum(problem.ops[op].seconds for op in evaluations) + stalls
    added_seconds = schedule.added_seconds(problem) + stalls
    peak_position = int(np.argmax(live))
    return Simulation(int(live[peak_position]), peak_position, seconds, added_seconds, live, stalls, host)


def lifetimes(problem: RematProblem, evaluations: tuple[int, ...], offloads: tuple[Offload, ...]) -> list[list[int]]:
    """Every version of every storage as [storage, position of its making, last position at which it is live]."""
    versions: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    outward = _by_position((offload.out_after, offload) for offload in offloads)
    back = _by_position((offload.back_before, offload) for offload in offloads)
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


def _by_position(pairs: Iterable[tuple[int, Offload]]) -> dict[int, list[Offload]]:
    """The offloads grouped by the position that each is paired with, in the order given."""
    grouped: dict[int, list[Offload]] = {}
    for position, offload in pairs:
        grouped.setdefault(position, []).append(offload)
    return grouped


def _offloading(problem: RematProblem, schedule: Schedule, link: Link | None) -> tuple[float, int]:
    """Seconds for which compute waits, and the most bytes on the host; an offload counts from `out_after` on."""
    if not schedule.offloads:
        return 0.0, 0
    if link is None:
        raise ValueError(f"the schedule has {len(schedule.offloads)} offloads: pass the link over which they go")
    change = np.zeros(len(schedule.evaluations) + 1, np.int64)
    for offload in schedule.offloads:
        change[offload.out_after] += problem.storages[offload.storage].bytes
        change[offload.back_before] -= problem.storages[offload.storage].bytes
    host_bytes = int(np.cumsum(change).max())
    if link.host_bytes is not None and host_bytes > link.host_bytes:
        raise ValueError(f"the schedule holds {host_bytes} bytes on the host, which has room for {link.host_bytes}")
    return stall_seconds(problem, schedule, link), host_bytes

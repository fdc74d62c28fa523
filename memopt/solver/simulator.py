"""Walks a schedule and counts live bytes and seconds: the only judge of feasibility.

It shares no code with the solvers on purpose, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.solver.link import Link
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Offload, Schedule
from memopt.solver.time_line import stall_seconds


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs. Positions count evaluations from 0."""

    peak_bytes: int
    peak_position: int
    """The first evaluation at which the peak is reached; -1 for an empty schedule."""
    seconds: float
    """Of all evaluations, and of the waits between them."""
    added_seconds: float
    """Of all evaluations beyond each op's first, and of the waits."""
    live_bytes: npt.NDArray[np.int64]
    """Per evaluation: resident bytes, every live version, what the op makes, and its workspace."""
    stall_seconds: float = 0.0
    """For which compute waits for transfers."""
    host_bytes: int = 0
    """The most bytes on the host at any position."""


def simulate(problem: RematProblem, schedule: Schedule, link: Link | None = None) -> Simulation:
    """Count the bytes live at each evaluation of `schedule`, and its seconds; `link` carries what it offloads.

    A read binds to the latest evaluation of the storage's producer, or to what was fetched since; a version dies right
    after its last read, or right after its making when nothing reads it. The first version of a kept storage never
    dies. What is being copied out is alive until `Offload.freed_before`, and the fetched copy from `fetch_from` on.

    Raises `ValueError` where the schedule breaks a rule (`Schedule.check`), offloads without a link, or puts more on
    the host than there is room for.
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
    grouped: dict[int, list[Offload]] = {}
    for position, offload in pairs:
        grouped.setdefault(position, []).append(offload)
    return grouped


def _offloading(problem: RematProblem, schedule: Schedule, link: Link | None) -> tuple[float, int]:
    """Seconds for which compute waits, and the most bytes on the host, where a stay counts from its first position."""
    if not schedule.offloads:
        return 0.0, 0
    if link is None:
        raise ValueError(f"the schedule offloads {len(schedule.offloads)} times: say over which link")
    change = np.zeros(len(schedule.evaluations) + 1, np.int64)
    for offload in schedule.offloads:
        change[offload.out_after] += problem.storages[offload.storage].bytes
        change[offload.back_before] -= problem.storages[offload.storage].bytes
    host_bytes = int(np.cumsum(change).max())
    if link.host_bytes is not None and host_bytes > link.host_bytes:
        raise ValueError(f"the schedule holds {host_bytes} bytes on the host, which has room for {link.host_bytes}")
    return stall_seconds(problem, schedule, link), host_bytes

"""The simulator's timing of offloads: compute and the two queues of a link on one time line.

Like the simulator it shares no code with the solvers.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt.solver.problem import Link, RematProblem
from memopt.solver.schedule import Schedule

Span = tuple[float, float]
"""Seconds from the start of the step at which something begins and is done."""


@dataclass(frozen=True)
class TimeLine:
    """When everything in a schedule runs, in seconds from its start."""

    starts: tuple[float, ...]
    """The start of each evaluation, after what it waits for."""
    out: tuple[Span, ...]
    """The copy to the host of each offload, in the order of `Schedule.offloads`."""
    back: tuple[Span, ...]
    """The copy from the host of each offload."""
    stall_seconds: float
    """Seconds for which compute waits for transfers; infinite if it waits for a link without bandwidth."""


def time_line(problem: RematProblem, schedule: Schedule, link: Link) -> TimeLine:
    """The times of all evaluations and transfers of a schedule.

    Before each evaluation compute waits for the copies out whose bytes are free from there on, then issues fetches,
    then waits for the fetches that are due. After the evaluation, copies out are issued. Each queue moves one storage
    at a time in the order of issue; transfers issued at the same position go by their deadlines.
    """
    offloads = schedule.offloads
    seconds = [link.transfer_seconds(problem.storages[offload.storage].bytes) for offload in offloads]
    numbers = range(len(offloads))
    outward = sorted(numbers, key=lambda i: (offloads[i].out_after, offloads[i].freed_before, i))
    fetched = sorted(numbers, key=lambda i: (offloads[i].fetch_from, offloads[i].back_before, i))
    frees = _grouped([offload.freed_before for offload in offloads], outward)
    issues = _grouped([offload.out_after for offload in offloads], outward)
    fetches = _grouped([offload.fetch_from for offload in offloads], fetched)
    needs = _grouped([offload.back_before for offload in offloads], fetched)
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
            begins = max(out_free, now)
            out_free = begins + seconds[i]
            out[i] = begins, out_free
    return TimeLine(tuple(starts), tuple(out), tuple(back), stalls)


def stall_seconds(problem: RematProblem, schedule: Schedule, link: Link) -> float:
    """Seconds for which compute waits for transfers; infinite if it waits for a link without bandwidth."""
    return time_line(problem, schedule, link).stall_seconds


def _grouped(positions: list[int], order: list[int]) -> dict[int, list[int]]:
    """The numbers of `order` grouped by position, where `positions[i]` is the position of number i."""
    grouped: dict[int, list[int]] = {}
    for i in order:
        grouped.setdefault(positions[i], []).append(i)
    return grouped

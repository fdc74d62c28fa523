"""The simulator's timing of offloads: compute and the two queues of a link on one time line.

Like the simulator it shares no code with the solvers.
"""

from __future__ import annotations

from memopt.solver.link import Link
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule


def stall_seconds(problem: RematProblem, schedule: Schedule, link: Link) -> float:
    """Seconds for which compute waits for transfers; infinite if it waits for a link without bandwidth.

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
    out_done, back_done = [0.0] * len(offloads), [0.0] * len(offloads)
    now = out_free = back_free = stalls = 0.0
    for position, op in enumerate(schedule.evaluations):
        start = now
        for i in frees.get(position, ()):
            now = max(now, out_done[i])
        for i in fetches.get(position, ()):
            back_done[i] = back_free = max(back_free, now) + seconds[i]
        for i in needs.get(position, ()):
            now = max(now, back_done[i])
        stalls += now - start if now > start else 0.0  # inf - inf would be NaN
        now += problem.ops[op].seconds
        for i in issues.get(position, ()):
            out_done[i] = out_free = max(out_free, now) + seconds[i]
    return stalls


def _grouped(positions: list[int], order: list[int]) -> dict[int, list[int]]:
    """The numbers of `order` grouped by position, where `positions[i]` is the position of number i."""
    grouped: dict[int, list[int]] = {}
    for i in order:
        grouped.setdefault(positions[i], []).append(i)
    return grouped

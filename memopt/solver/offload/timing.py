"""Compiled timing of schedules with offloads, for use inside the solvers; the simulator checks the final schedules."""

from __future__ import annotations

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints, IntTable
from memopt.solver.native import native


def stalled_seconds(arrays: Arrays, evaluations: Ints, offloads: IntTable, transfer_seconds: Floats) -> float:
    """Seconds for which compute waits for transfers, as `time_line.stall_seconds` counts them.

    The rows of `offloads` are as `Placer.place` returns them; `transfer_seconds` are per storage and direction.
    """
    _, out_after, freed, fetch, stop = offloads.T
    outward, fetched = np.lexsort((freed, out_after)), np.lexsort((stop, fetch))
    by_freed, by_stop = np.argsort(freed, kind="stable"), np.argsort(stop, kind="stable")
    seconds = transfer_seconds[offloads[:, 0]]
    return _wait(arrays.seconds[evaluations], offloads, seconds, outward, fetched, by_freed, by_stop)


def most_on_host(arrays: Arrays, evaluations: Ints, offloads: IntTable) -> int:
    """The most bytes on the host at any position; an offload counts from `out_after` up to `back_before`."""
    change = np.zeros(evaluations.size + 1, np.int64)
    np.add.at(change, offloads[:, 1], arrays.size[offloads[:, 0]])
    np.add.at(change, offloads[:, 4], -arrays.size[offloads[:, 0]])
    return int(np.cumsum(change).max())


@native
def _wait(
    compute: Floats, offloads: IntTable, seconds: Floats, outward: Ints, fetched: Ints, by_freed: Ints, by_stop: Ints
) -> float:
    """Seconds for which compute waits, from one pass over the positions with the four kinds of events in order.

    The last four arguments are the offloads by issue of the copy out, by fetch, by freed position and by next read.
    """
    count = seconds.size
    out_done, back_done = np.zeros(count), np.zeros(count)
    now = out_free = back_free = stalls = 0.0
    sent = freed = issued = needed = 0
    for position in range(compute.size):
        start = now
        while freed < count and offloads[by_freed[freed], 2] <= position:
            now = max(now, out_done[by_freed[freed]])
            freed += 1
        while issued < count and offloads[fetched[issued], 3] <= position:
            back_free = max(back_free, now) + seconds[fetched[issued]]
            back_done[fetched[issued]] = back_free
            issued += 1
        while needed < count and offloads[by_stop[needed], 4] <= position:
            now = max(now, back_done[by_stop[needed]])
            needed += 1
        if now > start:
            stalls += now - start
        now += compute[position]
        while sent < count and offloads[outward[sent], 1] <= position:
            out_free = max(out_free, now) + seconds[outward[sent]]
            out_done[outward[sent]] = out_free
            sent += 1
    return stalls

"""One direction of a link as a solver plans it: stretches of time in which it is busy, and where a transfer fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Floats, Ints
from memopt.solver.native import native_part


class Queue(NamedTuple):
    """Busy stretches by time, in seconds of compute; those that touch are one."""

    begin: Floats
    end: Floats
    stretches: Ints
    """How many there are, in one element."""


def empty_queue(most: int) -> Queue:
    """An idle queue for at most `most` transfers."""
    return Queue(np.zeros(most + 1), np.zeros(most + 1), np.zeros(1, np.int64))


@native_part
def earliest_start(queue: Queue, release: float, seconds: float) -> float:
    """The first moment from `release` on at which the queue is idle for `seconds`."""
    low, high = 0, queue.stretches[0]
    while low < high:
        middle = (low + high) // 2
        if queue.end[middle] > release:
            high = middle
        else:
            low = middle + 1
    start = release
    while low < queue.stretches[0] and queue.begin[low] < start + seconds:
        start = max(start, queue.end[low])
        low += 1
    return start


@native_part
def latest_start(queue: Queue, deadline: float, seconds: float) -> float:
    """The last moment from which the queue is idle for `seconds` that are over by `deadline`; it may be before 0."""
    low, high = 0, queue.stretches[0]
    while low < high:
        middle = (low + high) // 2
        if queue.begin[middle] < deadline:
            low = middle + 1
        else:
            high = middle
    stop = deadline
    low -= 1
    while low >= 0 and queue.end[low] > stop - seconds:
        stop = min(stop, queue.begin[low])
        low -= 1
    return stop - seconds


@native_part
def book(queue: Queue, start: float, seconds: float) -> None:
    """Make the queue busy for `seconds` from `start`, where it is idle."""
    begin, end, count = queue.begin, queue.end, queue.stretches[0]
    stop = start + seconds
    after = count
    while after > 0 and begin[after - 1] >= start:
        after -= 1
    joins_left = after > 0 and end[after - 1] >= start
    joins_right = after < count and begin[after] <= stop
    if joins_left and joins_right:
        end[after - 1] = end[after]
        for i in range(after, count - 1):
            begin[i], end[i] = begin[i + 1], end[i + 1]
        queue.stretches[0] = count - 1
    elif joins_left:
        end[after - 1] = stop
    elif joins_right:
        begin[after] = start
    else:
        for i in range(count, after, -1):
            begin[i], end[i] = begin[i - 1], end[i - 1]
        begin[after], end[after] = start, stop
        queue.stretches[0] = count + 1

"""One direction of a link as a solver plans it: the times at which it is busy, and when a transfer fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solver.arrays import Floats, Ints
from memopt.solver.native import native_part


class Queue(NamedTuple):
    """The busy intervals in order of time, in seconds of compute; intervals that touch are merged."""

    begin: Floats
    end: Floats
    stretches: Ints
    """The number of intervals, as an array of one element."""


def empty_queue(most: int) -> Queue:
    """An idle queue with room for `most` transfers."""
    return Queue(np.zeros(most + 1), np.zeros(most + 1), np.zeros(1, np.int64))


@native_part
def earliest_start(queue: Queue, release: float, seconds: float) -> float:
    """The earliest time, not before `release`, from which the queue is idle for `seconds`."""
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
    """The latest time from which the queue is idle for `seconds` that end by `deadline`; it may be negative."""
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
    """Mark the queue as busy for `seconds` from `start`; it must be idle then."""
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

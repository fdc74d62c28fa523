"""Reads from a meter that runs what the caller's own code, such as a loss outside of the model, allocates between a
forward and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from memopt.device.devices import device_of
from memopt.meter import PeakMeter
from memopt.run.entry import Entry

_BEGIN, _END = 12_347, 12_343
"""Sizes in bytes that mark two moments among the allocations: of a block that is freed at once."""


class UntilBackward:
    """A measurement that is under way, from the return of a forward to the beginning of its backward, by the events of
    the CPU's meter (`memopt.measure_peak`). It is no measurement of its own: torch allows one profiler at a time, and
    one that runs for the user's code would be in the way of the user's."""

    _running: ClassVar[UntilBackward | None] = None

    def __init__(self, entry: Entry) -> None:
        self.entry: Callable[[], Entry | None] = weakref.ref(entry)
        self.ended = False

    @classmethod
    def begin(cls, entry: Entry) -> None:
        """Begin to measure, where a forward returns while a meter runs."""
        if PeakMeter.running() is not None and device_of(entry.device).is_host:
            cls.drop()
            cls._running = measured = cls(entry)
            PeakMeter.listeners.append(measured.read)
            _mark(_BEGIN)

    @classmethod
    def backward_begins(cls, entry: Entry, *, alone: bool) -> None:
        """Note that the backward of a forward begins; `alone`: no other model ran before it."""
        measured = cls._running
        if measured is not None and measured.entry() is entry and alone and not measured.ended:
            measured.ended = True
            _mark(_END)

    @classmethod
    def drop(cls) -> None:
        """Drop what is under way, where it has not come to a backward: another forward begins."""
        if cls._running is not None and not cls._running.ended:
            cls._running.entry = lambda: None
        cls._running = None

    def read(self, events: Sequence[int]) -> None:
        """Read what was measured from the events of a meter whose block has ended."""
        PeakMeter.listeners.remove(self.read)
        entry, begin, end = self.entry(), _marked(events, _BEGIN), _marked(events, _END)
        if entry is not None and begin is not None and end is not None and begin < end:
            entry.meanwhile = max(0, entry.meanwhile or 0, *accumulate(events[begin:end]))


def _mark(nbytes: int) -> None:
    torch.empty(nbytes, dtype=torch.uint8)


def _marked(events: Sequence[int], nbytes: int) -> int | None:
    """The position after the latest mark of this size; None without one."""
    found = [place for place in range(1, len(events)) if events[place - 1] == nbytes and events[place] == -nbytes]
    return found[-1] + 1 if found else None

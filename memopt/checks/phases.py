"""Meters the phases of a step in one recording: the most bytes that each held, and the bytes that it left."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType

import torch

from memopt.compat.host import MemoryEvents
from memopt.device.devices import device_of
from memopt.meter import resident_cpu_blocks

# The mark that ends a phase in the recording: an allocation at an impossible address, of a size that no tensor has.
_MARK_ADDRESS, _MARK_BYTES = 1, (1 << 61) - 1


@dataclass(frozen=True)
class Phase:
    """Bytes beyond those present when the recording began; `left_bytes` may be negative."""

    peak_bytes: int
    left_bytes: int


class PhaseMeter:
    """Meters allocations and frees of its `with` block on `device`; each `end_phase()` ends a phase.

    On the CPU, frees are seen of memory allocated in the block and of memory that Python tensors hold at its start (see
    `measure_peak`); on CUDA the allocator's own statistics are read, and its peak statistics reset.
    """

    def __init__(self, device: torch.device) -> None:
        self.phases: tuple[Phase, ...] = ()
        """The phases; those of the CPU are known once the block has ended."""
        self._device = device
        self._events = MemoryEvents()
        self._start = 0

    def __enter__(self) -> PhaseMeter:
        kind = device_of(self._device)
        if kind.caching:
            self._start = kind.allocated_bytes(self._device)
            kind.reset_peak(self._device)
            return self
        there = resident_cpu_blocks()
        self._events.start()
        for address, nbytes in there.items():
            self._events.declare(address, nbytes)
        self._start = len(there)
        return self

    def end_phase(self) -> None:
        """End the present phase; the next begins with the bytes that it leaves."""
        kind = device_of(self._device)
        if not kind.caching:
            self._events.declare(_MARK_ADDRESS, _MARK_BYTES)
            return
        peak, now = kind.peak_bytes(self._device), kind.allocated_bytes(self._device)
        self.phases += (Phase(peak - self._start, now - self._start),)
        kind.reset_peak(self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not device_of(self._device).caching:
            self.phases = _phases(self._events.stop()[self._start :])


def _phases(events: list[int]) -> tuple[Phase, ...]:
    """The phases of allocations and frees in order, divided at the marks; what follows the last mark is left out."""
    phases: list[Phase] = []
    left = begin = 0
    for end in [index for index, nbytes in enumerate(events) if nbytes == _MARK_BYTES]:
        held = list(accumulate(events[begin:end], initial=left))
        phases.append(Phase(max(held), left := held[-1]))
        begin = end + 1
    return tuple(phases)

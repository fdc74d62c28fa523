"""A planned step as a memory snapshot, which pytorch.org/memory_viz opens like one that torch recorded.

The format is that of `torch.cuda.memory._snapshot`: the events of one step, then the segments with the blocks that are
left. Addresses come from the model of torch's caching allocator, so that gaps between blocks show as they would on a
card.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

from memopt.account.breakdown import WORKSPACE
from memopt.account.caching_allocator import CachingAllocator
from memopt.show.step import LiveRange, Step, StepMemory

_FIRST_ADDRESS = 0x7F00_0000_0000
_PAGE = 2 * 1024**2
_NAMED = frozenset({"parameters", "optimizer state", "gradients", "buffers", "inputs"})
"""Rows of the account that are categories in the snapshot. All others are "unknown", a category that the visualiser
expects to find."""
_NOTHING: dict[str, Any] = {"size": 0, "frames": []}
"""What holds a free block."""


def memory_snapshot(step: Step, memory: StepMemory) -> dict[str, Any]:
    """The step, with its memory over time, as a snapshot. The resident rows of the account are allocated first, with
    one block for each module that contributes to a row."""
    recording = _Recording()
    for row, nbytes in memory.resident.items():
        for module, share in step.shares(row, nbytes):
            name = f"{row} of {module}" if module else row
            recording.allocate((row, module), share, row if row in _NAMED else "unknown", [_frame(name)])
    born: dict[int, list[tuple[int, LiveRange]]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    for number, kept in enumerate(memory.ranges):
        born[kept.first].append((number, kept))
        dying[kept.last].append(number)
    last = len(memory.evaluations) - 1
    for moment, now in enumerate(memory.evaluations):
        recording.micros = round(now.start * 1e6)
        for number, kept in born[moment]:
            recording.allocate(number, kept.nbytes, kept.kind, _frames(step, kept.op))
        recording.allocate(WORKSPACE, now.workspace_bytes, WORKSPACE, _frames(step, now.op))
        recording.free(WORKSPACE)
        if moment < last:
            for number in dying[moment]:
                recording.free(number)
    return recording.snapshot()


class _Recording:
    """The allocations and frees of a planned step, at the addresses of the model of torch's allocator."""

    def __init__(self) -> None:
        self.micros = 0
        self.events: list[dict[str, Any]] = []
        self._allocator = CachingAllocator()
        self._live: dict[Hashable, dict[str, Any]] = {}

    def allocate(self, key: Hashable, nbytes: int, category: str, frames: list[dict[str, Any]]) -> None:
        """Record an allocation, which `free` finds by its `key`. Does nothing for 0 bytes."""
        if nbytes > 0:
            address = self._allocator.malloc(nbytes)
            self._live[key] = {"addr": address, "size": nbytes, "stream": 0, "category": category, "frames": frames}
            self._add("alloc", self._live[key])

    def free(self, key: Hashable) -> None:
        """Record that a block is freed, if it was allocated."""
        block = self._live.pop(key, None)
        if block is not None:
            self._allocator.free(block["addr"])
            self._add("free_requested", block)
            self._add("free_completed", block)

    def snapshot(self) -> dict[str, Any]:
        """The events, and the segments as they are after them. Addresses are changed so that the segments follow each
        other closely: the visualiser reads them as floating-point numbers, too coarse for the allocator's own."""
        owned = {block["addr"]: block for block in self._live.values()}
        starts: list[int] = []
        """The allocator's addresses of the segments."""
        segments: list[dict[str, Any]] = []
        end, base = -1, _FIRST_ADDRESS
        for address, nbytes, free in sorted(self._allocator.blocks()):
            if address != end:
                base += -(-segments[-1]["total_size"] // _PAGE) * _PAGE if segments else 0
                starts.append(address)
                segments.append(_segment(base))
            segment, owner, end = segments[-1], owned.get(address, _NOTHING), address + nbytes
            segment["total_size"] += nbytes
            segment["allocated_size"] += 0 if free else nbytes
            segment["active_size"] = segment["allocated_size"]
            segment["requested_size"] += owner["size"]
            block = {"address": base + address - starts[-1], "size": nbytes, "requested_size": owner["size"]}
            state = "inactive" if owner is _NOTHING else "active_allocated"
            segment["blocks"].append({**block, "state": state, "frames": owner["frames"]})
        for event in self.events:
            at = bisect_right(starts, event["addr"]) - 1
            event["addr"] += segments[at]["address"] - starts[at]
        return {"segments": segments, "device_traces": [self.events], "allocator_settings": {}}

    def _add(self, action: str, block: dict[str, Any]) -> None:
        self.events.append({"action": action, **block, "time_us": self.micros})


def _segment(address: int) -> dict[str, Any]:
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
    return {"device": 0, "address": address, **sizes, "stream": 0, "segment_type": "large", "frames": [], "blocks": []}


def _frames(step: Step, number: int) -> list[dict[str, Any]]:
    """The stack shown for a block: the name and module of the operator that makes it, and the user's line."""
    op = step.ops[number]
    path, _, line = op.source.rpartition(":")
    place = f"{op.name} of {op.module}" if op.module else op.name
    frames = [_frame(f"{place} {op.value}".strip())]
    return [*frames, {"name": op.code, "filename": path, "line": int(line)}] if op.source else frames


def _frame(name: str) -> dict[str, Any]:
    return {"name": name, "filename": "memopt", "line": 0}

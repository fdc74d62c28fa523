"""Replays the calls of training steps on a model of torch's CUDA allocator, to find what it
holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from memopt.account.caching_allocator import CachingAllocator, CardFullError
from memopt.account.card_state import CardState
from memopt.solver.problem import BlockCall

# The first step makes the optimiser's state, in the gaps that it left. Which blocks are cut changes for some more.
_STEPS = 8
# The least limit is found to this share of the bytes allocated.
_SHARE = 1 / 256


@dataclass(frozen=True)
class StepBlocks:
    """The blocks on the card beside those that a forward and backward make: what is there already, and the bytes of
    each that is still to come, in the order in which they are allocated."""

    resident: tuple[int, ...]
    """Allocated before the first step, and never freed."""
    state: tuple[int, ...] = ()
    """Allocated in the optimiser's first step, and kept."""
    temporaries: tuple[int, ...] = ()
    """Allocated in each of the optimiser's steps, and freed."""
    there: CardState | None = None
    """The blocks that the allocator has when the replay begins; None: it begins empty."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """The most bytes that the allocator hands out, rounded as it does, and the most that it holds."""

    allocated_bytes: int
    reserved_bytes: int
    releases: int
    """How often it returns memory to the card, which then waits; 0 without a limit."""


def replay(
    calls: Sequence[BlockCall],
    blocks: StepBlocks,
    *,
    expandable_segments: bool,
    limit_bytes: int | None = None,
) -> AllocatorPeaks:
    """The peaks of the allocator, which may hold `limit_bytes`, while training steps run, until one leaves the
    allocator as the one before did. `calls` are those of a forward and backward; what they leave allocated lives until
    the optimiser is done.

    Raises `CardFullError` where the limit is too low.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes, state=blocks.there)
    for nbytes in blocks.resident:
        allocator.malloc(nbytes)
    left: list[tuple[int, int, bool]] = []
    for step in range(_STEPS):
        alive = _run(allocator, calls)
        if step == 0:
            for nbytes in blocks.state:
                allocator.malloc(nbytes)
        for address in [allocator.malloc(nbytes) for nbytes in blocks.temporaries]:
            allocator.free(address)
        for address in alive:
            allocator.free(address)
        before, left = left, sorted(allocator.blocks())
        if left == before:
            break
    return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.releases)


@dataclass(frozen=True)
class Spare:
    """The share, as a fraction, of the allocator's bytes that is left for what no replay knows."""

    share: int
    whole: int = 1000

    def added_to(self, nbytes: int) -> int:
        """The least bytes of which `taken_from` leaves `nbytes`."""
        return -(-nbytes * (self.whole + self.share) // self.whole)

    def taken_from(self, nbytes: int) -> int:
        """The bytes that are left once the spare is set aside."""
        return nbytes * self.whole // (self.whole + self.share)


def replay_with_spare(
    ways: Sequence[Sequence[BlockCall]],
    blocks: StepBlocks,
    spare: Spare,
    *,
    expandable_segments: bool,
    limit_bytes: int,
) -> AllocatorPeaks:
    """The peaks with the limit less the spare, where the replay passes with all, half and nothing of the spare, for the
    calls in all `ways` in which a step may make them; the most of the ways.

    Where the allocator returns segments depends on the limit, and with it where its blocks lie: a process may run out
    of memory with a larger limit and not with a smaller one. It also decides which blocks are a little larger than what
    was asked for, so that the bytes allocated are the most of the three. Raises `CardFullError` where a limit is too
    low.
    """
    least = spare.taken_from(limit_bytes)
    limits = (least, (least + limit_bytes) // 2, limit_bytes)
    peaks = [
        [replay(calls, blocks, expandable_segments=expandable_segments, limit_bytes=limit) for calls in ways]
        for limit in limits
    ]
    return replace(_most(peaks[0]), allocated_bytes=max(found.allocated_bytes for found in chain(*peaks)))


def least_limit(
    ways: Sequence[Sequence[BlockCall]], blocks: StepBlocks, spare: Spare, *, expandable_segments: bool
) -> tuple[int, AllocatorPeaks]:
    """The least limit with which `replay_with_spare` passes, to 0.4%, and the peaks without a limit."""
    free = _most([replay(calls, blocks, expandable_segments=expandable_segments) for calls in ways])
    low, high = spare.added_to(free.allocated_bytes) - 1, spare.added_to(free.reserved_bytes)
    while high - low > max(1, _SHARE * free.allocated_bytes):
        # The least limit is more often near to the bytes handed out than to the bytes held.
        middle = low + (high - low + 3) // 4
        try:
            replay_with_spare(ways, blocks, spare, expandable_segments=expandable_segments, limit_bytes=middle)
        except CardFullError:
            low = middle
        else:
            high = middle
    return high, free


def _most(peaks: Sequence[AllocatorPeaks]) -> AllocatorPeaks:
    """The most of each figure."""
    return AllocatorPeaks(
        max(found.allocated_bytes for found in peaks),
        max(found.reserved_bytes for found in peaks),
        max(found.releases for found in peaks),
    )


def _run(allocator: CachingAllocator, calls: Sequence[BlockCall]) -> list[int]:
    """Make the calls, and return the addresses of the blocks that are left allocated."""
    addresses: dict[int, int] = {}
    for makes, number, nbytes in calls:
        if makes:
            addresses[number] = allocator.malloc(nbytes)
        else:
            allocator.free(addresses.pop(number))
    return list(addresses.values())

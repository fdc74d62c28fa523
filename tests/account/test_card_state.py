"""What torch's allocator holds when a step is planned: read from a snapshot, and where a replay begins."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.account.allocator_replay import StepBlocks, replay
from memopt.account.caching_allocator import _ABOVE, CachingAllocator, CardFullError
from memopt.account.card_state import CardState, HeldSegment, Kind, _Owners, merged, state_of
from memopt.disk_cache import as_json, value_from
from memopt.solver.problem import BlockCall

MB = 1024**2
HOLES = CardState(tuple(HeldSegment(False, (("other", 2 * MB), ("free", 18 * MB))) for _ in range(4)))
"""Four segments of 20 MB, of each of which 2 MB are in use."""
STEP = [BlockCall(True, 0, 30 * MB), BlockCall(True, 1, 16 * MB), BlockCall(False, 0, 0), BlockCall(False, 1, 0)]


@pytest.mark.parametrize("there", [None, CardState()])
def test_an_empty_state_is_that_of_a_process_that_has_just_begun(there: CardState | None) -> None:
    peaks = replay(STEP, StepBlocks((8 * MB,), there=there), expandable_segments=False)
    assert peaks.allocated_bytes == (8 + 30 + 16) * MB
    assert peaks.reserved_bytes == (20 + 30 + 16) * MB


def test_a_replay_uses_the_gaps_that_are_there_and_cannot_return_them() -> None:
    """8 and 16 MB lie in the gaps of 18; 30 MB need a segment of their own beside all 80 MB."""
    peaks = replay(STEP, StepBlocks((8 * MB,), there=HOLES), expandable_segments=False)
    assert peaks.allocated_bytes == (8 + 8 + 30 + 16) * MB
    assert peaks.reserved_bytes == (80 + 30) * MB
    replay(STEP, StepBlocks((8 * MB,), there=HOLES), expandable_segments=False, limit_bytes=110 * MB)
    with pytest.raises(CardFullError):
        replay(STEP, StepBlocks((8 * MB,), there=HOLES), expandable_segments=False, limit_bytes=110 * MB - 1)


def test_a_state_above_the_limit_is_refused() -> None:
    assert CachingAllocator(limit_bytes=80 * MB, state=HOLES).reserved_bytes == 80 * MB
    with pytest.raises(CardFullError, match="reserved already"):
        CachingAllocator(limit_bytes=79 * MB, state=HOLES)


def test_what_is_freed_before_the_step_leaves_its_place() -> None:
    state = CardState((HeldSegment(False, (("given", 4 * MB), ("gradients", 6 * MB), ("free", 10 * MB))),))
    allocator = CachingAllocator(state=state.without(["gradients"]))
    assert allocator.allocated_bytes == 4 * MB
    allocator.malloc(9 * MB)
    allocator.malloc(7 * MB)
    assert allocator.reserved_bytes == 20 * MB, "16 MB in a row"


def test_segments_of_other_streams_are_held_and_give_no_block() -> None:
    allocator = CachingAllocator(state=CardState(apart_bytes=20 * MB, apart_allocated_bytes=5 * MB))
    allocator.malloc(5 * MB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (10 * MB, 40 * MB)


def test_expandable_blocks_are_not_handed_out_once_they_are_off() -> None:
    state = CardState((HeldSegment(False, (("other", 2 * MB), ("free", 18 * MB)), expandable=True),))
    for setting, reserved in ((True, 20 * MB), (False, 40 * MB)):
        allocator = CachingAllocator(expandable_segments=setting, state=state)
        allocator.malloc(5 * MB)
        assert allocator.reserved_bytes == reserved


def test_the_pages_between_mapped_ones_are_mapped_first() -> None:
    """60 MB of addresses lie between two mapped pages; a block of 50 MB begins in the first and needs two of them."""
    page = (("other", 2 * MB), ("free", 18 * MB))
    state = CardState((
        HeldSegment(False, page, expandable=True),
        HeldSegment(False, (("other", 20 * MB),), expandable=True, gap_bytes=60 * MB),
    ))  # fmt: skip
    allocator = CachingAllocator(expandable_segments=True, state=state)
    allocator.malloc(50 * MB)
    assert allocator.reserved_bytes == 80 * MB


@pytest.mark.parametrize("blocks", [(), (("other", 0),), (("other", 100),), (("free", -512),)])
def test_segments_that_no_allocator_has_are_refused(blocks: tuple[tuple[Kind, int], ...]) -> None:
    with pytest.raises(ValueError, match="blocks whose bytes are multiples of 512"):
        HeldSegment(False, blocks)


def test_a_state_can_be_saved() -> None:
    assert value_from(CardState, as_json(HOLES)) == HOLES


def test_a_snapshot_is_read() -> None:
    """A parameter, a gradient, the optimiser's state, two workspaces, a tensor of one's size, and what nobody knows."""
    large = segment(1000 * MB, 80 * MB, [
        (4 * MB, 4 * MB), (3 * MB, 3 * MB - 100), (2 * MB, 2 * MB), (32 * MB, 32 * MB), (32 * MB, 32 * MB), (7 * MB, 0),
    ])  # fmt: skip
    small = segment(500 * MB, 2 * MB, [(MB, MB), (512, 8), (MB - 512, 0)], small=True)
    beside = segment(2000 * MB, 20 * MB, [(5 * MB, 5 * MB), (15 * MB, 0)], stream=7)
    owners = _Owners(
        given={1000 * MB: 4 * MB},
        gradients={1004 * MB: 3 * MB - 100},
        state={1007 * MB: 2 * MB},
        tensors={1041 * MB: 32 * MB},
    )
    found = state_of([large, small, beside], owners, [32 * MB, MB, 32 * MB, MB], stream=0)
    assert found.segments == (
        HeldSegment(True, (("library", MB), ("other", 512), ("free", MB - 512)), address=20 * MB),
        HeldSegment(False, (
            ("given", 4 * MB), ("gradients", 3 * MB), ("state", 2 * MB), ("library", 32 * MB), ("other", 32 * MB),
            ("free", 7 * MB),
        ), address=72 * MB),
    )  # fmt: skip
    assert (found.given_bytes, found.gradient_bytes, found.state_bytes) == (4 * MB, 3 * MB, 2 * MB)
    assert found.libraries == (MB, 32 * MB)
    assert (found.apart_bytes, found.apart_allocated_bytes) == (20 * MB, 5 * MB)
    assert found.other_bytes == 32 * MB + 512 + 5 * MB


def test_the_mapped_parts_of_an_expandable_segment_are_read_with_what_lies_between() -> None:
    parts = [segment(at * MB, 20 * MB, [(20 * MB, 20 * MB)], expandable=True) for at in (100, 160)]
    found = state_of(reversed(parts), _Owners(), [], stream=0)
    assert [part.gap_bytes for part in found.segments] == [0, 40 * MB]


def test_copies_of_a_call_are_free_so_that_it_is_planned_as_ahead_of_it() -> None:
    ahead = [segment(0, 2 * MB, [(MB, MB), (MB, 0)], small=True)]
    within = [
        segment(0, 2 * MB, [(MB, MB), (512, 512), (MB - 512, 0)], small=True),
        segment(10 * MB, 2 * MB, [(512, 512), (2 * MB - 512, 0)], small=True),
    ]
    given = _Owners({0: MB}, tensors={0: MB, MB: 512, 10 * MB: 512}, copies={MB: 512, 10 * MB: 512})
    assert state_of(within, given, [], stream=0) == state_of(ahead, given, [], stream=0)


def segment(
    address: int,
    total: int,
    blocks: list[tuple[int, int]],
    *,
    small: bool = False,
    stream: int = 0,
    expandable: bool = False,
) -> dict[str, Any]:
    """A segment as torch shows it, with blocks of a size and the bytes that were asked for, 0 for free ones."""
    starts = [address + sum(size for size, _ in blocks[:number]) for number in range(len(blocks))]
    return {
        "address": address,
        "total_size": total,
        "allocated_size": sum(size for size, asked in blocks if asked),
        "stream": stream,
        "segment_type": "small" if small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "blocks": [
            {
                "address": start,
                "size": size,
                "requested_size": asked,
                "state": "active_allocated" if asked else "inactive",
            }
            for start, (size, asked) in zip(starts, blocks, strict=True)
        ],
    }


CALLS = st.lists(
    st.tuples(st.sampled_from([700, MB // 2, MB, MB + 1, 3 * MB, 10 * MB, 21 * MB, 33 * MB]), st.integers(0, 6)),
    max_size=40,
)


@given(CALLS, CALLS, st.booleans())
@settings(deadline=None)
def test_an_allocator_that_begins_with_the_state_of_another_goes_on_as_that_one(
    before: list[tuple[int, int]], after: list[tuple[int, int]], expandable: bool
) -> None:
    used = CachingAllocator(expandable_segments=expandable)
    for nbytes in (1000, 2 * MB):  # the first page of each expandable segment stays
        used.malloc(nbytes)
    run(used, before)
    used._release()
    restored = CachingAllocator(expandable_segments=expandable, state=CardState(tuple(segments_of(used))))
    assert (restored.allocated_bytes, restored.reserved_bytes) == (used.allocated_bytes, used.reserved_bytes)
    # Which windows were taken at once is in no state.
    restored._addresses = deepcopy(used._addresses)
    for one in (used, restored):
        run(one, after)
    assert (restored.allocated_bytes, restored.reserved_bytes) == (used.allocated_bytes, used.reserved_bytes)


def run(allocator: CachingAllocator, calls: list[tuple[int, int]]) -> None:
    """Each call asks for a block and then frees one that many places back."""
    alive: list[int] = []
    for nbytes, back in calls:
        alive.append(allocator.malloc(nbytes))
        if back < len(alive):
            allocator.free(alive.pop(-1 - back))


def segments_of(allocator: CachingAllocator) -> Iterator[HeldSegment]:
    """The segments that an allocator holds, and the mapped parts of expandable ones."""
    parts: list[list[tuple[int, int, bool]]] = []
    for address, size, free in sorted(allocator.blocks()):
        if parts and allocator._blocks[address].before is allocator._blocks[parts[-1][-1][0]]:
            parts[-1].append((address, size, free))
        else:
            parts.append([(address, size, free)])
    ends: dict[bool, int] = {}
    for part in parts:
        small = allocator._blocks[part[0][0]].small
        blocks: list[tuple[Kind, int]] = [("free" if free else "other", size) for _, size, free in part]
        gap = part[0][0] - ends[small] if allocator.expandable_segments and small in ends else 0
        ends[small] = part[-1][0] + part[-1][1]
        address = None if allocator.expandable_segments else part[0][0] - _ABOVE
        yield HeldSegment(small, merged(blocks), allocator.expandable_segments, gap, address)


def test_new_segments_get_the_smallest_hole_or_addresses_below_all_others() -> None:
    """As CUDA's driver 580 gave them out on an H100, and of two free blocks of one size torch takes the lower."""
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(nbytes * MB) for nbytes in (20, 20, 50))
    assert (second - first, third - second) == (-32 * MB, -64 * MB)
    assert allocator.malloc(14 * MB) == third + 50 * MB
    assert allocator.malloc(12 * MB) == second + 20 * MB
    assert allocator.malloc(300 * MB) == third - 320 * MB
    for block in (first, second):
        allocator.free(block)
    assert allocator.malloc(20 * MB) == second


def test_ranges_without_segments_are_given_back_and_taken_again_from_above() -> None:
    allocator = CachingAllocator(limit_bytes=120 * MB)
    first, second, third = (allocator.malloc(nbytes * MB) for nbytes in (20, 40, 30))
    allocator.free(second)
    assert allocator.malloc(60 * MB) == second
    assert allocator.releases == 1
    assert (allocator.malloc(10 * MB), third) == (first + 20 * MB, second - 32 * MB)


def test_a_state_has_the_addresses_of_its_segments_from_the_lowest_window_without_empty_ones() -> None:
    places = (1010, 1030, 4000, 6016)
    parts = [segment(at * MB, 20 * MB, [(20 * MB, 20 * MB)]) for at in places]
    found = state_of(parts, _Owners(), [], stream=0)
    assert [part.address for part in found.segments] == [18 * MB, 38 * MB, 96 * MB, 160 * MB]

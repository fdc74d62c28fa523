"""torch's caching allocator as a model: sequences worked out by hand from its rules, and what must hold for any."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.account.caching_allocator import CachingAllocator, CardFullError
from memopt.account.card_state import rounded_bytes

MB = 1024**2


@pytest.mark.parametrize(("asked", "given_bytes"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MB + 1, MB + 512)])
def test_blocks_are_multiples_of_512_bytes(asked: int, given_bytes: int) -> None:
    assert rounded_bytes(asked) == given_bytes
    allocator = CachingAllocator()
    allocator.malloc(asked)
    assert allocator.allocated_bytes == given_bytes


@pytest.mark.parametrize(
    ("asked", "segment", "expandable"),
    [
        (1, 2 * MB, 2 * MB),
        (MB, 2 * MB, 2 * MB),
        (MB + 1, 20 * MB, 20 * MB),
        (10 * MB - 512, 20 * MB, 20 * MB),
        (10 * MB, 10 * MB, 20 * MB),
        (10 * MB + 1, 12 * MB, 20 * MB),
        (25 * MB, 26 * MB, 40 * MB),
    ],
)
def test_what_is_taken_from_the_card_for_a_block(asked: int, segment: int, expandable: int) -> None:
    for setting, expected in ((False, segment), (True, expandable)):
        allocator = CachingAllocator(expandable_segments=setting)
        allocator.malloc(asked)
        assert allocator.reserved_bytes == expected


def test_a_large_block_is_split_only_where_more_than_a_megabyte_would_remain() -> None:
    """A block of 12.5 MB leaves 1.5 MB of a segment of 14, which are split off; one of 13.5 MB leaves too little."""
    allocator = CachingAllocator()
    allocator.malloc(25 * MB // 2)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (25 * MB // 2, 14 * MB)
    allocator.malloc(27 * MB // 2)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (25 * MB // 2 + 14 * MB, 28 * MB)
    allocator.malloc(3 * MB // 2)
    assert allocator.reserved_bytes == 28 * MB, "in what was cut off"


def test_expandable_segments_always_split() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(27 * MB // 2)
    assert allocator.allocated_bytes == 27 * MB // 2
    allocator.malloc(13 * MB // 2)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 20 * MB


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    first = [allocator.malloc(nbytes * MB) for nbytes in (40, 20, 30)]
    for address in first:
        allocator.free(address)
    assert allocator.malloc(18 * MB) == first[1]
    assert allocator.malloc(30 * MB) == first[2]
    assert allocator.malloc(20 * MB) == first[0], "the rest of the smaller ones does not do"
    assert allocator.reserved_bytes == 90 * MB


def test_neighbours_are_joined_when_they_are_freed() -> None:
    """Three blocks of 5 MB in a segment of 20: 10 MB need a segment of their own until two neighbours are free."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(5 * MB) for _ in range(4)]
    assert allocator.reserved_bytes == 20 * MB
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.malloc(9 * MB)
    assert allocator.reserved_bytes == 40 * MB, "5 MB and 5 MB are not 9 in a row"
    allocator.free(blocks[1])
    allocator.malloc(15 * MB)
    assert allocator.reserved_bytes == 40 * MB


def test_holes_that_segments_keep_are_mapped_over_by_expandable_ones() -> None:
    """Ever larger blocks, one after the other: each takes a new segment, while an expandable one grows."""
    reserved = {}
    for setting in (False, True):
        allocator = CachingAllocator(expandable_segments=setting)
        for nbytes in (20 * MB, 40 * MB, 60 * MB):
            allocator.free(allocator.malloc(nbytes))
        reserved[setting] = allocator.reserved_bytes
    assert reserved == {False: 120 * MB, True: 60 * MB}


def test_within_a_limit_whole_segments_go_back_to_the_card() -> None:
    allocator = CachingAllocator(limit_bytes=60 * MB)
    for nbytes in (20 * MB, 40 * MB, 60 * MB):
        allocator.free(allocator.malloc(nbytes))
    assert allocator.reserved_bytes == 60 * MB
    assert allocator.releases == 1, "when the third did not fit beside the first two"
    held = allocator.malloc(2 * MB)
    with pytest.raises(CardFullError, match="above the limit"):
        allocator.malloc(60 * MB)
    allocator.free(held)
    assert allocator.malloc(60 * MB)


def test_within_a_limit_whole_pages_of_an_expandable_segment_go_back() -> None:
    """Of blocks at 0, 25 and 35 MB the middle one is live: 40 MB do not fit, so that all pages but its own go back."""
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=66 * MB)
    first, middle, last = (allocator.malloc(nbytes * MB) for nbytes in (25, 10, 25))
    assert allocator.reserved_bytes == 60 * MB
    allocator.free(first)
    allocator.free(last)
    assert allocator.malloc(40 * MB) == middle + 10 * MB, "what the page has left, and two more"
    assert allocator.releases == 1
    assert allocator.reserved_bytes == 60 * MB


def test_a_page_that_does_not_fit_is_not_mapped() -> None:
    allocator = CachingAllocator(expandable_segments=True, limit_bytes=30 * MB)
    allocator.malloc(15 * MB)
    with pytest.raises(CardFullError):
        allocator.malloc(6 * MB)


CALLS = st.lists(
    st.tuples(st.sampled_from([1, 700, MB // 2, MB, MB + 1, 3 * MB, 10 * MB, 21 * MB, 33 * MB]), st.integers(0, 6)),
    max_size=60,
)


@given(CALLS, st.booleans(), st.sampled_from([None, 90 * MB, 200 * MB]))
@settings(deadline=None)
def test_blocks_never_overlap_and_every_byte_is_accounted_for(
    calls: list[tuple[int, int]], expandable: bool, limit: int | None
) -> None:
    """Each call asks for a block and then frees one that many places back."""
    allocator = CachingAllocator(expandable_segments=expandable, limit_bytes=limit)
    alive: list[int] = []
    for nbytes, back in calls:
        try:
            alive.append(allocator.malloc(nbytes))
        except CardFullError:
            assert limit is not None
            assert allocator.releases
        if 0 < back <= len(alive):
            allocator.free(alive.pop(-back))
        check(allocator, alive)
    for address in alive:
        allocator.free(address)
    check(allocator, [])
    assert allocator.allocated_bytes == 0


def check(allocator: CachingAllocator, alive: list[int]) -> None:
    """Blocks lie one after the other, are alive or free, and make up what is held."""
    blocks = sorted(allocator.blocks())
    assert all(start + size <= following for (start, size, _), (following, _, _) in pairwise(blocks))
    assert {address for address, _, free in blocks if not free} == set(alive)
    assert sum(size for _, size, free in blocks if not free) == allocator.allocated_bytes
    assert sum(size for _, size, _ in blocks) == allocator.reserved_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.limit_bytes is None or allocator.peak_reserved_bytes <= allocator.limit_bytes
    free = [allocator._blocks[start] for start, _, free in blocks if free]
    assert not any(block.after and block.after.free and block.after.mapped for block in free), "they are one block"
    assert allocator.peak_allocated_bytes <= allocator.peak_reserved_bytes

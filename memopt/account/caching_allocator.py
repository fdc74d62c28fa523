"""A model of torch's CUDA caching allocator: the blocks that it hands out and the segments that it holds, in numbers.

Source: c10/cuda/CUDACachingAllocator.cpp (`malloc`, `get_free_block`, `alloc_found_block`, `free_block`,
`try_merge_blocks`, `find_expandable_block`, `release_cached_blocks`) with the default settings: no largest block to
split, no rounding to powers of two, one stream."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

from memopt.account.card_state import WINDOW_BYTES, CardState, HeldSegment, rounded_bytes
from memopt.device.cuda import BLOCK_BYTES

MB = 1024**2
SMALL_BYTES = MB
"""The largest block of the small pool, which has segments of its own (`kSmallSize`)."""
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MB, 20 * MB  # kSmallBuffer, kLargeBuffer; also the pages of expandable segments
_OWN_SEGMENT = 10 * MB  # a block of this size or more has a segment of its own (kMinLargeAlloc)
_OWN_ROUNDING = 2 * MB  # kRoundLarge
_ADDRESSES = 2**22 * _LARGE_SEGMENT  # room of an expandable segment: more than any card has, in whole pages
_ABOVE = 2**24 * _LARGE_SEGMENT  # segments that are there from the start lie above, and new ones below


class CardFullError(MemoryError):
    """Raised where the allocator needs more than its limit, even after it has returned free memory to the card."""


class _Addresses:
    """The addresses of segments, as CUDA's driver gives them out. They matter since torch takes the lower of two free
    blocks of one size.

    The driver takes addresses in ranges of whole windows (`WINDOW_BYTES`). What no segment uses of a range is a hole. A
    new segment gets the first of the smallest holes that are large enough, else a new range at the highest free place.
    A range without segments is given back. With `rising` a new range lies above all others instead, since the process
    does not know which places are free."""

    def __init__(self, *, rising: bool) -> None:
        self._rising = rising
        self._holes: list[tuple[int, int]] = []
        """(bytes, address) of each hole, ascending."""
        self._hole_bytes: dict[int, int] = {}
        """Bytes of each hole, by address."""
        self._hole_before: dict[int, int] = {}
        """The address of each hole, by its end."""
        self._starts: list[int] = []
        """The addresses of ranges, ascending."""
        self._ranges: dict[int, list[int]] = {}
        """By the address of a range: its bytes, and those that segments use."""
        self._free: list[tuple[int, int]] = [(0, _ABOVE)]
        """The places for new ranges, each as (address, end), ascending."""

    def occupy(self, segments: Iterable[tuple[int, int]]) -> None:
        """Take the windows of these segments (address, bytes), ascending; what is left of a window is a hole."""
        end: int | None = None
        begin = 0
        for address, nbytes in segments:
            window = address // WINDOW_BYTES * WINDOW_BYTES
            if end is None or window > end + -end % WINDOW_BYTES:
                self._end_range(begin, end)
                begin = end = window
                self._add_range(begin, 0)
            self._add_hole(end, address - end)
            self._ranges[begin][1] += nbytes
            end = address + nbytes
        self._end_range(begin, end)

    def _end_range(self, begin: int, end: int | None) -> None:
        if end is not None:
            self._add_hole(end, -end % WINDOW_BYTES)
            self._ranges[begin][0] = end + -end % WINDOW_BYTES - begin

    def _add_range(self, address: int, nbytes: int) -> None:
        insort(self._starts, address)
        self._ranges[address] = [nbytes, 0]

    def take(self, nbytes: int) -> int:
        """The address of a new segment."""
        at = bisect_left(self._holes, (nbytes, 0))
        if at < len(self._holes):
            room, address = self._holes[at]
            self._fill_hole(address)
        else:
            room = nbytes + -nbytes % WINDOW_BYTES
            address = self._above() if self._rising else self._highest(room)
            self._add_range(address, room)
        self._ranges[self._range_of(address)][1] += nbytes
        self._add_hole(address + nbytes, room - nbytes)
        return address

    def _above(self) -> int:
        return self._starts[-1] + self._ranges[self._starts[-1]][0] if self._starts else _ABOVE

    def _highest(self, nbytes: int) -> int:
        """The highest free address for a new range of `nbytes`, which is taken from the free places."""
        at = next(at for at in reversed(range(len(self._free))) if self._free[at][1] - self._free[at][0] >= nbytes)
        start, end = self._free.pop(at)
        if start < end - nbytes:
            self._free.insert(at, (start, end - nbytes))
        return end - nbytes

    def _range_of(self, address: int) -> int:
        return self._starts[bisect_right(self._starts, address) - 1]

    def give_back(self, address: int, nbytes: int) -> None:
        """Make a hole where a segment was, joined with those on both sides."""
        start = self._range_of(address)
        room, used = self._ranges[start]
        self._ranges[start][1] -= nbytes
        begin, end = address, address + nbytes
        if end < start + room and end in self._hole_bytes:
            end += self._fill_hole(end)
        if begin > start and begin in self._hole_before:
            begin = self._hole_before[begin]
            self._fill_hole(begin)
        if used > nbytes:
            self._add_hole(begin, end - begin)
            return
        self._starts.pop(bisect_left(self._starts, start))
        del self._ranges[start]
        if start < _ABOVE:
            self._add_place(start, start + room)

    def _add_place(self, start: int, end: int) -> None:
        """Add a place for new ranges, joined with those on both sides."""
        at = bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
        insort(self._free, (start, end))

    def _add_hole(self, address: int, nbytes: int) -> None:
        if nbytes:
            insort(self._holes, (nbytes, address))
            self._hole_bytes[address] = nbytes
            self._hole_before[address + nbytes] = address

    def _fill_hole(self, address: int) -> int:
        """Remove a hole; returns its bytes."""
        nbytes = self._hole_bytes.pop(address)
        del self._hole_before[address + nbytes]
        self._holes.pop(bisect_left(self._holes, (nbytes, address)))
        return nbytes


class _Block:
    __slots__ = ("address", "after", "before", "expandable", "free", "mapped", "size", "small")

    def __init__(self, address: int, size: int, *, small: bool, expandable: bool, mapped: bool = True) -> None:
        self.address, self.size, self.small, self.mapped = address, size, small, mapped
        self.expandable = expandable
        self.free = True
        self.before: _Block | None = None
        self.after: _Block | None = None

    @property
    def room(self) -> int:
        """Its bytes, plus those of the unmapped block behind it, if there is one."""
        follows = self.after
        return self.size + (follows.size if follows is not None and not follows.mapped else 0)


class CachingAllocator:
    """Simulates blocks and segments of torch's CUDA caching allocator; `malloc` returns an address, which `free` takes.

    Args:
        expandable_segments: as in `PYTORCH_CUDA_ALLOC_CONF`: one segment a pool, mapped page by page, instead of many.
        limit_bytes: the bytes that it may reserve, as `torch.cuda.set_per_process_memory_fraction` sets it; None:
            any amount.
        state: the blocks that exist at the start: free ones may be allocated, the others are never freed.
        rising: whether a new segment is placed above all others; else at the highest address where it has room.

    Raises `CardFullError` where the state is above the limit."""

    def __init__(
        self,
        *,
        expandable_segments: bool = False,
        limit_bytes: int | None = None,
        state: CardState | None = None,
        rising: bool = False,
    ) -> None:
        self.expandable_segments, self.limit_bytes = expandable_segments, limit_bytes
        self.allocated_bytes = self.reserved_bytes = self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.releases = 0
        """How often it returned memory to the card to stay within the limit; the card waits each time."""
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, _Block] = {}
        self._unmapped: dict[bool, list[int]] = {True: [], False: []}
        self._addresses, self._ranges = _Addresses(rising=rising), _ABOVE
        last = self._restore(state or CardState())
        if expandable_segments:
            for small in (True, False):
                self._add_range(small, last.get(small))

    def malloc(self, nbytes: int) -> int:
        """The address of a block of at least `nbytes`; 0 for 0 bytes. Raises `CardFullError` above the limit."""
        if not nbytes:
            return 0
        size = rounded_bytes(nbytes)
        small = size <= SMALL_BYTES
        block = self._best_fit(size, small) or self._grow(size, small)
        rest = block.size - size
        if rest >= BLOCK_BYTES if small or self.expandable_segments else rest > SMALL_BYTES:
            self._add_free(self._cut(block, size))
        block.free = False
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block.address

    def free(self, address: int) -> None:
        """Free a block, and join it with the free blocks on both sides."""
        if not address:
            return
        block = self._blocks[address]
        assert not block.free, f"the block at {address} is free already"
        self.allocated_bytes -= block.size
        block.free = True
        self._add_free(self._join(block))

    def blocks(self) -> Iterator[tuple[int, int, bool]]:
        """For each block that is mapped to memory: its address, its bytes, and whether it is free."""
        return ((block.address, block.size, block.free) for block in self._blocks.values() if block.mapped)

    def _restore(self, state: CardState) -> dict[bool, _Block]:
        """Add the segments of a state; return, by pool (True: small), the last block of its expandable segment."""
        last: dict[bool, _Block] = {}
        self._addresses.occupy((_ABOVE + one.address, one.nbytes) for one in state.segments if one.address is not None)
        for segment in state.segments:
            block = self._restore_segment(segment, last.get(segment.small) if segment.expandable else None)
            if segment.expandable:
                last[segment.small] = block
            self._reserve(segment.nbytes)
        self._reserve(state.apart_bytes)
        self.allocated_bytes += state.apart_allocated_bytes
        self.peak_allocated_bytes = self.allocated_bytes
        if self._is_above(0):
            raise CardFullError(
                f"{self.reserved_bytes} bytes are reserved already, above the limit of {self.limit_bytes}"
            )
        return last

    def _restore_segment(self, segment: HeldSegment, before: _Block | None) -> _Block:
        """Add a segment, after the last block `before` of the same expandable one, if any; return its last block."""
        expandable = segment.expandable
        if before is not None:
            address = before.address + before.size
        elif expandable:
            address = self._new_range()
        else:
            address = self._addresses.take(segment.nbytes) if segment.address is None else _ABOVE + segment.address
        parts = [(False, kind == "free", nbytes) for kind, nbytes in segment.blocks]
        if before is not None and segment.gap_bytes:
            parts.insert(0, (True, True, segment.gap_bytes))
        for is_gap, free, nbytes in parts:
            block = _Block(address, nbytes, small=segment.small, expandable=expandable, mapped=not is_gap)
            block.free, block.before, address = free, before, address + nbytes
            if before is not None:
                before.after = block
            before = block
            self._blocks[block.address] = block
            if is_gap:
                self._add_unmapped(block)
            elif not free:
                self.allocated_bytes += nbytes
            elif self.expandable_segments or not expandable:  # torch hands out no expandable block once they are off
                self._add_free(block)
        assert before is not None, "a segment has a block"
        return before

    def _add_range(self, small: bool, last: _Block | None) -> None:
        """Add the addresses of a pool's expandable segment that are not mapped, behind its `last` mapped block."""
        start = self._new_range() if last is None else last.address + last.size
        rest = _Block(start, _ADDRESSES, small=small, expandable=True, mapped=False)
        if last is not None:
            last.after, rest.before = rest, last
        self._add_unmapped(rest)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        """Take the smallest free block that is large enough, the first in memory of several. With expandable segments,
        go on to the next larger ones while each has less `room`. None if no block is large enough."""
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        if at == len(free):
            return None
        if self.expandable_segments:
            while at + 1 < len(free) and self._blocks[free[at + 1][1]].room < self._blocks[free[at][1]].room:
                at += 1
        return self._blocks[free.pop(at)[1]]

    def _grow(self, size: int, small: bool) -> _Block:
        """A block in memory that is newly taken from the card. Raises `CardFullError` above the limit."""
        wanted = self._wanted(size, small)
        if self._is_above(wanted):
            self._release()
            wanted = self._wanted(size, small)
            if self._is_above(wanted):
                raise CardFullError(
                    f"{self.reserved_bytes} bytes are reserved; {wanted} more are above the limit of {self.limit_bytes}"
                )
        if self.expandable_segments:
            return self._map(size, small)
        block = _Block(self._addresses.take(wanted), wanted, small=small, expandable=False)
        self._blocks[block.address] = block
        self._reserve(wanted)
        return block

    def _wanted(self, size: int, small: bool) -> int:
        """Bytes that the card must have free for a block. torch compares a whole segment with the limit."""
        segment = _segment_bytes(size)
        if not self.expandable_segments:
            return segment
        start = self._first_place(size, small)
        return max(segment, _whole_pages(size - start.size if start.mapped else size, small))

    def _is_above(self, more: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + more > self.limit_bytes

    def _map(self, size: int, small: bool) -> _Block:
        """A free block at the first place with enough addresses, mapped as far as needed."""
        block = self._first_place(size, small)
        if not block.mapped:
            block = self._map_pages(block, min(block.size, size))
        while block.size < size:
            follows = block.after
            assert follows is not None
            block = self._map_pages(follows, min(size - block.size, follows.size))
        self._take(block)
        return block

    def _first_place(self, size: int, small: bool) -> _Block:
        """The first unmapped block in memory with enough addresses, or the free block before it."""
        return next(found for address in self._unmapped[small] if (found := self._room_at(self._blocks[address], size)))

    def _room_at(self, unmapped: _Block, size: int) -> _Block | None:
        before = unmapped.before
        start = before if before is not None and before.free else unmapped
        room, block = 0, start
        while room < size:
            room += block.size
            if room >= size or block.after is None or not block.after.free:
                break
            block = block.after
        return start if room >= size else None

    def _map_pages(self, block: _Block, size: int) -> _Block:
        """Map the pages at the start of an unmapped block that hold `size` bytes; return the free block with them."""
        mapped = min(_whole_pages(size, block.small), block.size)
        self._unmapped[block.small].remove(block.address)
        block.mapped = True
        if mapped < block.size:
            self._add_unmapped(self._cut(block, mapped, mapped=False))
        self._reserve(mapped)
        joined = self._join(block)
        self._add_free(joined)
        return joined

    def _release(self) -> None:
        """Return free segments, or free pages of expandable ones, to the card."""
        self.releases += 1
        for small, free in self._free.items():
            for _, address in list(free):
                block = self._blocks[address]
                if block.expandable:
                    self._unmap(block, small)
                elif block.before is None and block.after is None:
                    self._take(block)
                    del self._blocks[address]
                    self._addresses.give_back(address, block.size)
                    self.reserved_bytes -= block.size

    def _unmap(self, block: _Block, small: bool) -> None:
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
        if end <= start:
            return
        self._take(block)
        if block.address + block.size > end:
            self._add_free(self._cut(block, end - block.address))
        if start > block.address:
            whole = self._cut(block, start - block.address)
            self._add_free(block)
            block = whole
        self.reserved_bytes -= block.size
        block.mapped = False
        self._add_unmapped(self._join(block))

    def _cut(self, block: _Block, size: int, *, mapped: bool = True) -> _Block:
        """Shrink the block to its first `size` bytes; return a block of the rest."""
        rest = _Block(
            block.address + size, block.size - size, small=block.small, expandable=block.expandable, mapped=mapped
        )
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._blocks[rest.address] = rest
        return rest

    def _join(self, block: _Block) -> _Block:
        """Join the block with free neighbours, where both are mapped or both unmapped; return the result."""
        for other in (block.before, block.after):
            if other is None or not other.free or other.mapped != block.mapped:
                continue
            if other.mapped:
                self._take(other)
            else:
                self._unmapped[other.small].remove(other.address)
            block, second = (other, block) if other.address < block.address else (block, other)
            block.size += second.size
            block.after = second.after
            if second.after is not None:
                second.after.before = block
            del self._blocks[second.address]
        return block

    def _take(self, block: _Block) -> None:
        free = self._free[block.small]
        free.pop(bisect_left(free, (block.size, block.address)))

    def _add_free(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address))

    def _add_unmapped(self, block: _Block) -> None:
        self._blocks[block.address] = block
        insort(self._unmapped[block.small], block.address)

    def _reserve(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _new_range(self) -> int:
        self._ranges += 2 * _ADDRESSES  # so that no two touch
        return self._ranges


def _whole_pages(size: int, small: bool) -> int:
    page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
    return -(-size // page) * page


def _segment_bytes(size: int) -> int:
    """Bytes taken from the card for a block of `size` bytes."""
    if size <= SMALL_BYTES:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _OWN_ROUNDING) * _OWN_ROUNDING

"""The calls of torch's allocator that a step makes by its schedule, and their replay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from memopt.account.caching_allocator import SMALL_BYTES, CachingAllocator
from memopt.account.card_state import CardState
from memopt.solver import Offload, Op, RematProblem, Schedule
from memopt.solver.problem import BlockCall
from memopt.solver.simulator import by_position, lifetimes


def step_ways(problem: RematProblem, schedule: Schedule) -> tuple[Sequence[BlockCall], ...]:
    """The allocations and frees of a step (`step_calls`) for each way in which the caller may treat the forward's
    results: holding them until the optimizer has stepped, or dropping them before the backward, as
    `model(**batch).loss.backward()` drops all but the loss. Either may run out of memory where the other does not.
    Results of up to `SMALL_BYTES` are in segments of their own: if all are so small, only the first way is returned."""
    kept = step_calls(problem, schedule)
    if all(problem.storages[result].bytes <= SMALL_BYTES for result in problem.results):
        return (kept,)
    return kept, step_calls(problem, schedule, dropped=True)


def step_calls(problem: RematProblem, schedule: Schedule, *, dropped: bool = False) -> list[BlockCall]:
    """The allocations and frees of one forward and backward, in order. Blocks in use after the last evaluation are not
    freed. With `dropped`, each of the forward's results is freed when the backward begins, or after the last operator
    that reads it. Raises `ValueError` where the schedule breaks a rule of `Schedule.check`."""
    schedule.check(problem)
    evaluations, offloads, forward_end = _emitted(problem, schedule)
    born: list[dict[int, int]] = [{} for _ in evaluations]
    dying: list[list[int]] = [[] for _ in evaluations]
    last = len(evaluations) - 1
    results = problem.results if dropped else frozenset()
    if results:
        storages = [replace(one, kept=one.kept and n not in results) for n, one in enumerate(problem.storages)]
        problem = replace(problem, storages=tuple(storages))
    versions = lifetimes(problem, evaluations, offloads)
    for number, (storage, made, dies) in enumerate(versions):
        born[made][storage] = number
        if storage in results:
            dying[max(dies, forward_end)].append(number)
        elif dies < last or not problem.storages[storage].kept:
            dying[dies].append(number)
    calls: list[BlockCall] = []
    unused = len(versions)
    for position, index in enumerate(evaluations):
        op = problem.ops[index]
        within = _within(problem, op, born[position], unused)
        unused += 1 + max((block for _, block, _ in op.calls), default=0)
        allocated = {number for allocates, number, _ in within if allocates}
        # What is fetched from the host gets its block before the operator runs.
        for storage, number in sorted(born[position].items(), key=lambda version: version[0] in op.makes):
            if number not in allocated:
                calls.append(BlockCall(True, number, problem.storages[storage].bytes))
        calls += within
        calls += (BlockCall(False, number, 0) for number in dying[position])
    return calls


def _emitted(problem: RematProblem, schedule: Schedule) -> tuple[tuple[int, ...], tuple[Offload, ...], int]:
    """The evaluations that emitted code runs: those whose results are read or kept, and those of operators that make
    nothing or must not be recomputed; the offloads with positions among these evaluations; and the position of the
    forward's last one. A schedule has others only because it evaluates every operator."""
    out_at = by_position((offload.out_after, offload) for offload in schedule.offloads)
    back_at = by_position((offload.back_before, offload) for offload in schedule.offloads)
    first = {index: position for position, index in reversed(list(enumerate(schedule.evaluations)))}
    wanted: set[int] = set()
    read: list[int] = []
    for position, index in reversed(list(enumerate(schedule.evaluations))):
        op = problem.ops[index]
        wanted.update(offload.storage for offload in out_at.get(position, ()))
        result = first[index] == position and any(problem.storages[storage].kept for storage in op.makes)
        if result or not op.recomputable or not op.makes or not wanted.isdisjoint(op.makes):
            wanted = (wanted - set(op.makes)) | set(op.reads)
            read.append(position)
        wanted.difference_update(offload.storage for offload in back_at.get(position, ()))
    read.reverse()
    forward_end = max((first[index] for index in range(problem.forward_ops)), default=0)
    offloads = tuple(
        Offload(
            offload.storage,
            bisect_right(read, offload.out_after) - 1,
            *(bisect_left(read, at) for at in (offload.freed_before, offload.fetch_from, offload.back_before)),
        )
        for offload in schedule.offloads
    )
    evaluations = tuple(schedule.evaluations[position] for position in read)
    return evaluations, offloads, max(0, bisect_right(read, forward_end) - 1)


def _within(problem: RematProblem, op: Op, versions: Mapping[int, int], unused: int) -> list[BlockCall]:
    """The calls within one evaluation of an operator, with block numbers that are unique in the step: `versions` has
    the number for each storage that it makes, and the blocks of its workspace get numbers from `unused` on. Where no
    calls are known, the workspace is one block."""
    found = []
    for allocates, block, nbytes in op.calls:
        if block >= len(op.makes):
            found.append(BlockCall(allocates, unused + block, nbytes))
        elif allocates and op.makes[block] in versions:
            storage = op.makes[block]
            found.append(BlockCall(True, versions[storage], problem.storages[storage].bytes))
    if not found and (nbytes := op.workspace_bytes):
        return [BlockCall(True, unused, nbytes), BlockCall(False, unused, nbytes)]
    return found


# The most steps that are replayed: the first allocates the optimizer's state in gaps, so that others differ from it.
_STEPS = 8


@dataclass(frozen=True)
class StepBlocks:
    """The blocks outside of forward and backward, as bytes in the order of allocation, and those there at first."""

    resident: tuple[int, ...]
    """Allocated before the first step, and never freed."""
    state: tuple[int, ...] = ()
    """Allocated in the optimizer's first step, and kept."""
    temporaries: tuple[int, ...] = ()
    """Allocated in each of the optimizer's steps, and freed."""
    copies: tuple[int, ...] = ()
    """Copies of the inputs in the first step, which are freed before the state is allocated (`run.changed_inputs`)."""
    there: CardState | None = None
    """The blocks that the allocator has when the replay begins; None: it begins empty."""


class AllocatorPeaks(NamedTuple):
    """The most bytes that the allocator allocates at once, rounded up to blocks, and the most that it reserves."""

    allocated_bytes: int
    reserved_bytes: int
    releases: int
    """How often it returns memory to the card, whose kernels must end first; 0 without a limit."""


def replay(
    calls: Sequence[BlockCall],
    blocks: StepBlocks,
    *,
    expandable_segments: bool,
    limit_bytes: int | None = None,
    rising: bool = False,
) -> AllocatorPeaks:
    """The peaks of the allocator over several training steps. The allocator may reserve `limit_bytes`; None: any
    amount. Steps are replayed until one leaves the same blocks as the one before, or a fixed number of times. `calls`
    are the allocations and frees of one forward and backward; blocks that they do not free live until the optimizer is
    done. `rising` is as for `CachingAllocator`. Raises `CardFullError` where the limit is too low."""
    allocator = CachingAllocator(
        expandable_segments=expandable_segments, limit_bytes=limit_bytes, state=blocks.there, rising=rising
    )
    for nbytes in blocks.resident:
        allocator.malloc(nbytes)
    left: list[tuple[int, int, bool]] = []
    for step in range(_STEPS):
        copies = [allocator.malloc(nbytes) for nbytes in blocks.copies if step == 0]
        alive = _run(allocator, calls)
        for address in copies:
            allocator.free(address)
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


_WHOLE = 1000
"""A safety margin for memory that no replay shows is given as its `spare`: of `_WHOLE + spare` bytes, `spare` stay
free."""


def with_spare(nbytes: int, spare: int) -> int:
    """The smallest limit that leaves `nbytes` after the margin is subtracted: the inverse of `without_spare`."""
    return -(-nbytes * (_WHOLE + spare) // _WHOLE)


def without_spare(nbytes: int, spare: int) -> int:
    """The bytes of the limit `nbytes` that are left after the margin is subtracted."""
    return nbytes * _WHOLE // (_WHOLE + spare)


def replay_with_spare(
    ways: Sequence[Sequence[BlockCall]],
    blocks: StepBlocks,
    spare: int,
    *,
    expandable_segments: bool,
    limit_bytes: int,
) -> AllocatorPeaks:
    """The peaks of the allocator when the margin `spare` (see `with_spare`) of `limit_bytes` stays free: the largest
    over all `ways` in which a step may allocate and free. The step must also fit when half of the margin stays free,
    and when nothing does; the latter with and without copies of the inputs, as a region's first run makes them, and
    with and without `rising` (see `CachingAllocator`). The limit decides when the allocator returns segments, and so
    where blocks lie, and which blocks are a little larger than requested: a process may run out of memory with a larger
    limit and not with a smaller one. Raises `CardFullError` where a replay needs more than its limit."""
    least = without_spare(limit_bytes, spare)
    bare = replace(blocks, copies=())
    runs = [
        (least, blocks, False),
        ((least + limit_bytes) // 2, bare, False),
        (limit_bytes, blocks, False),
        *([(limit_bytes, bare, False)] if blocks.copies else []),
        *([] if expandable_segments else [(limit_bytes, bare, True)]),
    ]
    peaks = [
        [
            replay(calls, held, expandable_segments=expandable_segments, limit_bytes=limit, rising=rising)
            for calls in ways
        ]
        for limit, held, rising in runs
    ]
    most = _most(peaks[0])
    allocated_bytes = max(found.allocated_bytes for found in chain(*peaks))
    return AllocatorPeaks(allocated_bytes, most.reserved_bytes, most.releases)


def peaks_without_limit(
    ways: Sequence[Sequence[BlockCall]], blocks: StepBlocks, *, expandable_segments: bool
) -> AllocatorPeaks:
    """The peaks of an allocator without a limit: the largest over all `ways` in which a step may allocate and free."""
    return _most([replay(calls, blocks, expandable_segments=expandable_segments) for calls in ways])


def _most(peaks: Sequence[AllocatorPeaks]) -> AllocatorPeaks:
    """The most of each figure."""
    return AllocatorPeaks(*map(max, zip(*peaks, strict=True)))


def _run(allocator: CachingAllocator, calls: Sequence[BlockCall]) -> list[int]:
    """Make the calls, and return the addresses of the blocks that are left allocated."""
    addresses: dict[int, int] = {}
    for makes, number, nbytes in calls:
        if makes:
            addresses[number] = allocator.malloc(nbytes)
        else:
            allocator.free(addresses.pop(number))
    return list(addresses.values())

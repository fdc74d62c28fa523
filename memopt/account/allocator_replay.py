"""Replays the calls of training steps, run by a schedule, on a model of torch's CUDA allocator, to find what it
holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memopt.account.caching_allocator import CachingAllocator, CardFullError
from memopt.solver import BlockCall, Op, RematProblem, Schedule
from memopt.solver.simulator import lifetimes

# The first step makes the optimiser's state, in the gaps that it left. Which blocks are cut changes for some more.
_STEPS = 8
# The least limit is found to this share of the bytes allocated.
_SHARE = 1 / 256


@dataclass(frozen=True)
class StepBlocks:
    """The blocks on the card beside those that a schedule makes: bytes of each, in the order of allocation."""

    resident: tuple[int, ...]
    """Allocated before the first step, and never freed."""
    state: tuple[int, ...] = ()
    """Allocated in the optimiser's first step, and kept."""
    temporaries: tuple[int, ...] = ()
    """Allocated in each of the optimiser's steps, and freed."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """The most bytes that the allocator hands out, rounded as it does, and the most that it holds."""

    allocated_bytes: int
    reserved_bytes: int
    releases: int
    """How often it returns memory to the card, which then waits; 0 without a limit."""


def replay(
    problem: RematProblem,
    schedule: Schedule,
    blocks: StepBlocks,
    *,
    expandable_segments: bool,
    limit_bytes: int | None = None,
) -> AllocatorPeaks:
    """The peaks of the allocator, which may hold `limit_bytes`, while training steps run by `schedule`, until one
    leaves the allocator as the one before did.

    Results of a step live until the optimiser is done.

    Raises `CardFullError` where the limit is too low, `ValueError` where the schedule breaks a rule.
    """
    schedule.check(problem)
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    calls = _calls(problem, schedule)
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


def least_limit(
    problem: RematProblem, schedule: Schedule, blocks: StepBlocks, *, expandable_segments: bool
) -> tuple[int, AllocatorPeaks]:
    """The least limit with which `replay` passes, to 0.4%, and the peaks without a limit."""
    free = replay(problem, schedule, blocks, expandable_segments=expandable_segments)
    low, high = free.allocated_bytes - 1, free.reserved_bytes
    while high - low > max(1, _SHARE * free.allocated_bytes):
        # The least limit is more often near to the bytes handed out than to the bytes held.
        middle = low + (high - low + 3) // 4
        try:
            replay(problem, schedule, blocks, expandable_segments=expandable_segments, limit_bytes=middle)
        except CardFullError:
            low = middle
        else:
            high = middle
    return high, free


def _calls(problem: RematProblem, schedule: Schedule) -> list[BlockCall]:
    """The allocator's calls in one forward and backward. Blocks that die after the last evaluation are left
    allocated."""
    evaluations = schedule.evaluations
    born: list[dict[int, int]] = [{} for _ in evaluations]
    dying: list[list[int]] = [[] for _ in evaluations]
    last = len(evaluations) - 1
    versions = lifetimes(problem, evaluations, schedule.offloads)
    for number, (storage, made, dies) in enumerate(versions):
        born[made][storage] = number
        if dies < last or not problem.storages[storage].kept:
            dying[dies].append(number)
    calls: list[BlockCall] = []
    unused = len(versions)
    for position, index in enumerate(evaluations):
        op = problem.ops[index]
        within = _renumbered(problem, op, born[position], unused)
        unused += 1 + max((block for _, block, _ in op.calls), default=0)
        allocated = {number for allocates, number, _ in within if allocates}
        for storage, number in born[position].items():
            if number not in allocated:
                calls.append(BlockCall(True, number, problem.storages[storage].bytes))
        calls += within or _workspace(op, unused - 1)
        calls += (BlockCall(False, number, 0) for number in dying[position])
    return calls


def _workspace(op: Op, number: int) -> list[BlockCall]:
    """The calls for a workspace of which no more is known than its bytes."""
    nbytes = op.workspace_bytes
    return [BlockCall(True, number, nbytes), BlockCall(False, number, nbytes)] if nbytes else []


def _renumbered(problem: RematProblem, op: Op, versions: Mapping[int, int], unused: int) -> list[BlockCall]:
    """The calls within an operator, with the numbers of the versions of the storages that it makes, and with numbers
    from `unused` on for the blocks of its workspace."""
    found = []
    for allocates, block, nbytes in op.calls:
        if block >= len(op.makes):
            found.append(BlockCall(allocates, unused + block, nbytes))
        elif allocates and op.makes[block] in versions:
            storage = op.makes[block]
            found.append(BlockCall(True, versions[storage], problem.storages[storage].bytes))
    return found


def _run(allocator: CachingAllocator, calls: Sequence[BlockCall]) -> list[int]:
    """Make the calls, and return the addresses of the blocks that are left allocated."""
    addresses: dict[int, int] = {}
    for makes, number, nbytes in calls:
        if makes:
            addresses[number] = allocator.malloc(nbytes)
        else:
            allocator.free(addresses.pop(number))
    return list(addresses.values())

"""What torch's CUDA allocator holds while training steps run by a schedule: its calls, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopt.account.caching_allocator import CachingAllocator, CardFullError
from memopt.solver import RematProblem, Schedule
from memopt.solver.simulator import lifetimes

# The first makes the optimiser's state, in whatever it left; the second has it from its start.
_STEPS = 2
# The least limit is found to this share.
_SHARE = 1 / 256


@dataclass(frozen=True)
class StepBlocks:
    """What lies on the card beside what a schedule makes: bytes of each block, in the order of their making."""

    resident: tuple[int, ...]
    """There before the first step, and always."""
    state: tuple[int, ...] = ()
    """Made in the optimiser's first step, and kept."""
    temporaries: tuple[int, ...] = ()
    """Made in each of its steps, and freed."""


@dataclass(frozen=True)
class AllocatorPeaks:
    """The most bytes that the allocator hands out, its rounding included, and that it holds."""

    allocated_bytes: int
    reserved_bytes: int
    releases: int
    """How often it has to give memory back to the card, which then waits: never without a limit."""


def replay(
    problem: RematProblem,
    schedule: Schedule,
    blocks: StepBlocks,
    *,
    expandable_segments: bool,
    limit_bytes: int | None = None,
) -> AllocatorPeaks:
    """Run two training steps by `schedule` through a model of the allocator, which may hold `limit_bytes`.

    Results of the step live until the optimiser is done.

    Raises `CardFullError` where the limit is too low, `ValueError` where the schedule breaks a rule.
    """
    schedule.check(problem)
    allocator = CachingAllocator(expandable_segments=expandable_segments, limit_bytes=limit_bytes)
    calls = _calls(problem, schedule)
    for nbytes in blocks.resident:
        allocator.malloc(nbytes)
    for step in range(_STEPS):
        alive = _run(allocator, calls)
        if step == 0:
            for nbytes in blocks.state:
                allocator.malloc(nbytes)
        for address in [allocator.malloc(nbytes) for nbytes in blocks.temporaries]:
            allocator.free(address)
        for address in alive:
            allocator.free(address)
    return AllocatorPeaks(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.releases)


def least_limit(
    problem: RematProblem, schedule: Schedule, blocks: StepBlocks, *, expandable_segments: bool
) -> tuple[int, AllocatorPeaks]:
    """The least limit with which `replay` passes, to 0.4%, and the peaks without one."""
    free = replay(problem, schedule, blocks, expandable_segments=expandable_segments)
    low, high = free.allocated_bytes - 1, free.reserved_bytes
    while high - low > max(1, _SHARE * free.allocated_bytes):
        # The least is more often near to what is handed out than to what is held.
        middle = low + (high - low + 3) // 4
        try:
            replay(problem, schedule, blocks, expandable_segments=expandable_segments, limit_bytes=middle)
        except CardFullError:
            low = middle
        else:
            high = middle
    return high, free


Call = tuple[bool, int, int]
"""Whether a block is made (else freed), the number of the block, and its bytes."""


def _calls(problem: RematProblem, schedule: Schedule) -> list[Call]:
    """The allocator's calls in one forward and backward. What is freed after the last evaluation is left alive."""
    evaluations = schedule.evaluations
    born: list[list[tuple[int, int]]] = [[] for _ in evaluations]
    dying: list[list[int]] = [[] for _ in evaluations]
    last = len(evaluations) - 1
    versions = lifetimes(problem, evaluations, schedule.offloads)
    for number, (storage, made, dies) in enumerate(versions):
        born[made].append((number, problem.storages[storage].bytes))
        if dies < last or not problem.storages[storage].kept:
            dying[dies].append(number)
    calls: list[Call] = []
    for position, op in enumerate(evaluations):
        calls += ((True, number, nbytes) for number, nbytes in born[position])
        if problem.ops[op].workspace_bytes:
            workspace = len(versions) + position
            calls += ((True, workspace, problem.ops[op].workspace_bytes), (False, workspace, 0))
        calls += ((False, number, 0) for number in dying[position])
    return calls


def _run(allocator: CachingAllocator, calls: Sequence[Call]) -> list[int]:
    """Make the calls; gives the addresses of what is left alive."""
    addresses: dict[int, int] = {}
    for makes, number, nbytes in calls:
        if makes:
            addresses[number] = allocator.malloc(nbytes)
        else:
            allocator.free(addresses.pop(number))
    return list(addresses.values())

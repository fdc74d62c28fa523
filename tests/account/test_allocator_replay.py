"""The bytes that the allocator holds for a schedule: one sequence by hand, and bounds for any problem."""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.models.problems import random_problem, random_schedule
from memopt.account.allocator_replay import (
    StepBlocks,
    peaks_without_limit,
    replay,
    replay_with_spare,
    step_calls,
    with_spare,
    without_spare,
)
from memopt.account.caching_allocator import CardFullError
from memopt.solver import Op, RematProblem, Schedule, Storage, simulate
from memopt.solver.problem import BlockCall

MB = 1024**2
# x (8 MB) → y (30 MB, with 4 MB of workspace) → gradient (8 MB, kept), each of what is before it.
CHAIN = RematProblem(
    (Op("x", 1, (), (0,)), Op("y", 1, (0,), (1,), workspace_bytes=4 * MB), Op("g", 1, (0, 1), (2,))),
    (Storage("x", 8 * MB), Storage("y", 30 * MB), Storage("g", 8 * MB, kept=True)),
    2,
)
CALLS = step_calls(CHAIN, Schedule.save_all(CHAIN))
PARAMETER = StepBlocks(resident=(8 * MB,), state=(8 * MB, 8 * MB), temporaries=(8 * MB,))


def test_two_steps_of_a_chain() -> None:
    """The parameter, x and the workspace fill a segment of 20 MB, y has its own of 30, g is in another of 20.

    The optimiser's state takes x's place and what is left beside g, its temporary a part of y's segment. In the second
    step x lies where g was, and g needs one more segment.
    """
    peaks = replay(CALLS, PARAMETER, expandable_segments=False)
    assert peaks.allocated_bytes == (8 + 16 + 8 + 30 + 8) * MB
    assert peaks.reserved_bytes == (20 + 30 + 20 + 20) * MB
    assert not peaks.releases


def least_limit(spare: int, *, expandable: bool) -> int:
    """The least limit in whole MB with which a replay of the chain passes."""

    def passes(limit_mb: int) -> bool:
        try:
            replay_with_spare([CALLS], PARAMETER, spare, expandable_segments=expandable, limit_bytes=limit_mb * MB)
        except CardFullError:
            return False
        return True

    return bisect_left(range(200), True, key=passes) * MB


def test_the_least_limit_lies_between_what_is_handed_out_and_what_is_held_without_a_limit() -> None:
    for setting in (False, True):
        free = peaks_without_limit([CALLS], PARAMETER, expandable_segments=setting)
        least = least_limit(0, expandable=setting)
        assert free.allocated_bytes <= least <= free.reserved_bytes
        within = replay(CALLS, PARAMETER, expandable_segments=setting, limit_bytes=least)
        assert within.reserved_bytes <= least
        with pytest.raises(CardFullError):
            replay(CALLS, PARAMETER, expandable_segments=setting, limit_bytes=least - MB)


def test_a_limit_passes_with_and_without_its_spare() -> None:
    spare = 100
    least = least_limit(spare, expandable=False)
    for limit in (without_spare(least, spare), least):
        replay(CALLS, PARAMETER, expandable_segments=False, limit_bytes=limit)
    with pytest.raises(CardFullError):
        replay_with_spare([CALLS], PARAMETER, spare, expandable_segments=False, limit_bytes=least - MB)


def test_gradients_live_until_the_optimizer_is_done() -> None:
    kept = replay(CALLS, StepBlocks((), (), (60 * MB,)), expandable_segments=False)
    assert kept.allocated_bytes == 68 * MB


def test_the_calls_within_an_operator_are_followed_in_order() -> None:
    """A copy (30 MB) comes before the result (40 MB), and two parts (12 MB) lie in the copy's place when it is freed:
    the result's segment is the third one's neighbour in time, not in memory."""
    copy = [BlockCall(True, 1, 30 * MB), BlockCall(True, 0, 40 * MB), BlockCall(False, 1, 30 * MB)]
    parts = [
        call for number in (2, 3) for call in (BlockCall(True, number, 12 * MB), BlockCall(False, number, 12 * MB))
    ]
    op = Op("loss", 1, (), (0,), workspace_bytes=30 * MB, calls=(*copy, *parts))
    problem = RematProblem((op,), (Storage("gradient", 40 * MB, kept=True),), 1)
    peaks = replay(step_calls(problem, Schedule.save_all(problem)), StepBlocks(()), expandable_segments=False)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (70 * MB, 70 * MB)
    together = replace(problem, ops=(replace(op, calls=(*copy[:2], *parts, copy[2])),))
    peaks = replay(step_calls(together, Schedule.save_all(together)), StepBlocks(()), expandable_segments=False)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (82 * MB, 82 * MB)


@given(st.integers(0, 10**6), st.sampled_from([1, 1000, 300_000]), st.booleans())
@settings(deadline=None, max_examples=50)
def test_bounds(seed: int, scale: int, expandable: bool) -> None:
    """The bytes that are read are handed out, and at most a megabyte a block more than the simulated ones."""
    chance = random.Random(seed)
    small = random_problem(chance, 8)
    storages = tuple(replace(storage, bytes=storage.bytes * scale) for storage in small.storages)
    problem = replace(small, storages=storages)
    schedule = random_schedule(chance, problem)
    calls = step_calls(problem, schedule)
    peaks = replay(calls, StepBlocks((1000,)), expandable_segments=expandable)
    sizes = {call.block: call.bytes for call in calls if call.allocates}
    alive = max(accumulate(sizes[call.block] * (1 if call.allocates else -1) for call in calls), default=0)
    asked = simulate(problem, schedule).peak_bytes - problem.resident_bytes + 1000
    blocks = 2 * len(schedule.evaluations) + len(problem.storages) + 1
    assert alive + 1000 <= peaks.allocated_bytes <= asked + blocks * MB
    assert peaks.allocated_bytes <= peaks.reserved_bytes


@pytest.mark.parametrize("nbytes", [0, 1, 199, 2**20 - 1, 2_164_260_864, 10**11 + 7])
def test_what_the_replay_needs_is_left_of_what_is_asked_for(nbytes: int) -> None:
    assert without_spare(with_spare(nbytes, 15), 15) == nbytes


def test_the_bytes_allocated_are_the_most_with_any_of_the_spare() -> None:
    """In this random sequence the allocator takes larger blocks where it has the spare, too."""
    chance = random.Random(32)
    calls, alive = [], []
    for number in range(40):
        calls.append(BlockCall(True, number, chance.randint(2 * MB, 16 * MB)))
        alive.append(number)
        if len(alive) > 6:
            calls.append(BlockCall(False, alive.pop(chance.randrange(len(alive))), 0))
    spare, limit = 15, 128 * MB
    peaks = replay_with_spare([calls], StepBlocks(()), spare, expandable_segments=False, limit_bytes=limit)
    least, most = (
        replay(calls, StepBlocks(()), expandable_segments=False, limit_bytes=nbytes)
        for nbytes in (without_spare(limit, spare), limit)
    )
    assert least.allocated_bytes < most.allocated_bytes == peaks.allocated_bytes


def test_copies_of_inputs_lie_there_in_the_first_step_alone() -> None:
    calls = [BlockCall(True, 0, 40 * MB), BlockCall(False, 0, 0)]
    plain, copied = (
        replay(calls, StepBlocks((), state=(30 * MB,), copies=copies), expandable_segments=False)
        for copies in ((), (20 * MB,))
    )
    assert (plain.allocated_bytes, copied.allocated_bytes) == (70 * MB, 70 * MB)
    assert copied.reserved_bytes - plain.reserved_bytes == 20 * MB

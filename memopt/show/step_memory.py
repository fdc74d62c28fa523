"""What a schedule holds at every moment of a step, and when everything in it runs."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.account.account import Account
from memopt.account.breakdown import ANY_LINK, kind_of, optimizer_rows, output_bytes, resident_rows
from memopt.planning.module_rows import forward_evaluations
from memopt.show.step import Copy, Evaluation, LiveRange, StepMemory
from memopt.solver import Link, RematProblem, Schedule
from memopt.solver.simulator import TimeLine, lifetimes, time_line


def step_memory(
    problem: RematProblem, schedule: Schedule, account: Account, numbers: Sequence[int], link: Link | None
) -> StepMemory:
    """The memory of a step that runs by `schedule`. `numbers` gives the number in `Step.ops` of each op of the problem,
    `account` what the step holds beside the problem's storages; the problem's own resident bytes are ignored."""
    times = time_line(problem, schedule, link or ANY_LINK)
    return StepMemory(
        resident={row: nbytes for row, nbytes in resident_rows(account).items() if nbytes},
        evaluations=_evaluations(problem, schedule, numbers, times),
        boundary=forward_evaluations(problem, schedule),
        ranges=_ranges(problem, schedule, numbers),
        optimizer={row: nbytes for row, nbytes in optimizer_rows(account, output_bytes(problem)).items() if nbytes},
        seconds=sum(problem.ops[op].seconds for op in schedule.evaluations) + times.stall_seconds,
        copies=_copies(problem, schedule, numbers, times),
    )


def _evaluations(
    problem: RematProblem, schedule: Schedule, numbers: Sequence[int], times: TimeLine
) -> tuple[Evaluation, ...]:
    seen: set[int] = set()
    made = []
    for op, start in zip(schedule.evaluations, times.starts, strict=True):
        made.append(Evaluation(numbers[op], start, problem.ops[op].workspace_bytes, op in seen))
        seen.add(op)
    return tuple(made)


def _ranges(problem: RematProblem, schedule: Schedule, numbers: Sequence[int]) -> tuple[LiveRange, ...]:
    """All versions of all storages, in the order of their making."""
    evaluations = schedule.evaluations
    first: dict[int, int] = {}
    for position, op in enumerate(evaluations):
        first.setdefault(op, position)
    found = []
    for storage, born, dies in lifetimes(problem, evaluations, schedule.offloads):
        maker = problem.producer[storage]
        kind = kind_of(problem, storage, first=born == first[maker], fetched=evaluations[born] != maker)
        found.append(LiveRange(numbers[maker], problem.storages[storage].bytes, kind, born, dies))
    return tuple(sorted(found, key=lambda kept: kept.first))


def _copies(problem: RematProblem, schedule: Schedule, numbers: Sequence[int], times: TimeLine) -> tuple[Copy, ...]:
    """The copies to the host and back, in the order of their beginning."""
    found = []
    for offload, out, back in zip(schedule.offloads, times.out, times.back, strict=True):
        op = numbers[problem.producer[offload.storage]]
        nbytes = problem.storages[offload.storage].bytes
        found += [Copy(op, nbytes, True, *out), Copy(op, nbytes, False, *back)]
    return tuple(sorted(found, key=lambda copy: copy.start))

"""What a schedule means for each module of the model."""

from __future__ import annotations

from collections import Counter

from memopt.account.breakdown import is_receipt, live_versions
from memopt.planning.captured import Joined
from memopt.show.rows import ModuleRow
from memopt.solver import RematProblem, Schedule


def module_rows(joined: Joined, schedule: Schedule) -> tuple[ModuleRow, ...]:
    """What each module keeps for the backward and evaluates again, in the order of the forward."""
    return tuple(_rows(joined, schedule).values())


def _rows(joined: Joined, schedule: Schedule) -> dict[str, ModuleRow]:
    problem = joined.problem
    boundary = forward_evaluations(problem, schedule)
    again = schedule.recomputed()
    read_later = {s for index in schedule.evaluations[boundary:] for s in problem.ops[index].reads}
    made_again = {s for index in again for s in problem.ops[index].makes}
    moved = Counter(stay.storage for stay in schedule.offloads)
    read_later -= {stay.storage for stay in schedule.offloads if stay.freed_before <= boundary <= stay.fetch_from}
    rows: dict[str, ModuleRow] = {}
    for index, (region, local) in enumerate(joined.owner[: problem.forward_ops]):
        if is_receipt(problem.ops[index]):
            continue
        path = joined.prices[region].modules[local]
        row = rows.get(path, ModuleRow(path))
        op, times = problem.ops[index], again.get(index, 0)
        made = sum(problem.storages[s].bytes for s in op.makes)
        saved = sum(problem.storages[s].bytes for s in op.makes if s in read_later and s not in made_again)
        rows[path] = ModuleRow(
            path,
            row.ops + 1,
            row.saved_bytes + saved,
            row.recomputed_bytes + made * times,
            row.recomputed_ops + times,
            row.seconds + op.seconds,
            row.added_seconds + op.seconds * times,
            row.offloaded_bytes + sum(problem.storages[s].bytes * moved[s] for s in op.makes),
        )
    return rows


def held_after_forward(problem: RematProblem, schedule: Schedule) -> int:
    """Bytes that the forward leaves for the backward and the caller."""
    boundary = forward_evaluations(problem, schedule)
    live = live_versions(problem, schedule, boundary)
    made_inside = (
        storage
        for storage, made in live
        if made < boundary
        and not (problem.storages[storage].kept and is_receipt(problem.ops[problem.producer[storage]]))
    )
    return sum(problem.storages[storage].bytes for storage in made_inside)


def forward_evaluations(problem: RematProblem, schedule: Schedule) -> int:
    """How many evaluations come before the backward: up to the last forward op's first."""
    return schedule.evaluations.index(problem.forward_ops - 1) + 1 if problem.forward_ops else 0

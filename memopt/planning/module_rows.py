"""The bytes that a schedule saves, recomputes and offloads in each module of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from memopt.account.breakdown import is_receipt, live_versions
from memopt.planning.joined import Joined
from memopt.solver import RematProblem, Schedule


@dataclass(frozen=True)
class ModuleRow:
    """One module's share of a plan. Bytes are of a whole step, seconds by the time model."""

    path: str
    """Qualified name of the module; empty for operators outside of any submodule."""
    ops: int = 0
    """Operators that the module's forward runs."""
    saved_bytes: int = 0
    """Bytes that stay on the device from the forward to the backward."""
    recomputed_bytes: int = 0
    """Bytes that recomputation makes a second (or further) time."""
    recomputed_ops: int = 0
    """Operators that recomputation runs, each counted as often as it is recomputed."""
    seconds: float = 0.0
    """Seconds of the module's forward, each operator once."""
    added_seconds: float = 0.0
    """Seconds of recomputation."""
    offloaded_bytes: int = 0
    """Bytes that are copied to the host's memory and back."""


def module_rows(joined: Joined, schedule: Schedule) -> tuple[ModuleRow, ...]:
    """For each module, in the order of the forward: what it saves for the backward, recomputes and offloads."""
    problem = joined.problem
    saved = _saved_storages(problem, schedule)
    recomputed = schedule.recomputed()
    moved = Counter(offload.storage for offload in schedule.offloads)
    rows: dict[str, ModuleRow] = {}
    for index, (region, local) in enumerate(joined.owner[: problem.forward_ops]):
        op, times = problem.ops[index], recomputed.get(index, 0)
        if is_receipt(op):
            continue
        path = joined.prices[region].modules[local]
        row = rows.get(path, ModuleRow(path))
        nbytes = {storage: problem.storages[storage].bytes for storage in op.makes}
        rows[path] = ModuleRow(
            path,
            row.ops + 1,
            row.saved_bytes + sum(nbytes[storage] for storage in op.makes if storage in saved),
            row.recomputed_bytes + sum(nbytes.values()) * times,
            row.recomputed_ops + times,
            row.seconds + op.seconds,
            row.added_seconds + op.seconds * times,
            row.offloaded_bytes + sum(nbytes[storage] * moved[storage] for storage in op.makes),
        )
    return tuple(rows.values())


def _saved_storages(problem: RematProblem, schedule: Schedule) -> set[int]:
    """Storages that the backward reads as the forward made them, and that are on the device between the two."""
    boundary = forward_evaluations(problem, schedule)
    read = {storage for index in schedule.evaluations[boundary:] for storage in problem.ops[index].reads}
    remade = {storage for index in schedule.recomputed() for storage in problem.ops[index].makes}
    away = {offload.storage for offload in schedule.offloads if offload.freed_before <= boundary <= offload.fetch_from}
    return read - remade - away


def held_after_forward(problem: RematProblem, schedule: Schedule) -> int:
    """Bytes that the forward leaves for the backward and the caller."""
    return sum(problem.storages[storage].bytes for storage in held_storages(problem, schedule))


def held_storages(problem: RematProblem, schedule: Schedule) -> Iterator[int]:
    """The storages that the forward leaves for the backward and the caller, without the gradients of its outputs."""
    boundary = forward_evaluations(problem, schedule)
    for storage, made in live_versions(problem, schedule, boundary):
        given = problem.storages[storage].kept and is_receipt(problem.ops[problem.producer[storage]])
        if made < boundary and not given:
            yield storage


def forward_evaluations(problem: RematProblem, schedule: Schedule) -> int:
    """How many evaluations come before the backward: up to the first of the last forward op."""
    return schedule.evaluations.index(problem.forward_ops - 1) + 1 if problem.forward_ops else 0

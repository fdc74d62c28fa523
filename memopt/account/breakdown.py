"""The bytes alive at a schedule's peak, each counted in one row of a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from memopt.account.account import GRADIENTS, OUTPUTS, Account
from memopt.solver import Link, RematProblem, Schedule, simulate
from memopt.solver.simulator import lifetimes

ANY_LINK = Link(math.inf)
"""An infinitely fast link, for simulations of which only the bytes are needed: these do not depend on its rate."""

TEMPORARIES, WORKSPACE = "backward temporaries", "workspace"
SAVED, RECOMPUTED, FETCHED = "saved activations", "recomputed activations", "fetched activations"
BROUGHT = "fetched parameters"
OPTIMIZER_STEP = "optimizer.step()"
EAGER = "eager_code"
"""The name of ops that stand for what eager code between captured regions holds."""
BETWEEN_REGIONS = "between the regions"
MEANWHILE = "until the backward"
"""The row of what other code takes between the forward and the backward."""


@dataclass(frozen=True)
class Breakdown:
    """The peak of a step in bytes, the op that runs at that moment (`at`), and the rows that add up to the peak."""

    peak_bytes: int
    at: str
    rows: tuple[tuple[str, int], ...]


def breakdown(problem: RematProblem, schedule: Schedule, account: Account) -> Breakdown:
    """The rows of memory, in bytes, at the step's peak: in the forward, the backward or the optimizer's step. Resident
    bytes come from `account`; `problem.resident_bytes` is ignored."""
    simulation = simulate(problem, schedule, ANY_LINK)
    moving = simulation.peak_bytes - problem.resident_bytes
    graph_peak = account.resident_bytes + moving
    in_step = account.optimizer_rows(problem.output_bytes)
    optimizer_peak = sum(in_step.values())
    if optimizer_peak > graph_peak:
        return Breakdown(optimizer_peak, OPTIMIZER_STEP, _ordered(in_step))
    rows = dict(account.resident_rows)
    for name, nbytes in live_bytes_by_kind(problem, schedule, simulation.peak_position).items():
        rows[name] = rows.get(name, 0) + nbytes
    at = problem.ops[schedule.evaluations[simulation.peak_position]].name
    return Breakdown(graph_peak, at, _ordered(rows))


def live_bytes_by_kind(problem: RematProblem, schedule: Schedule, position: int) -> dict[str, int]:
    """Bytes alive while evaluation `position` runs, by row: of storages (`kind_of`), workspace, and other code."""
    op_now = problem.ops[schedule.evaluations[position]]
    totals: Counter[str] = Counter()
    for storage, evaluation in live_versions(problem, schedule, position):
        maker = problem.producer[storage]
        first = schedule.evaluations.index(maker) == evaluation
        kind = kind_of(problem, storage, first=first, fetched=schedule.evaluations[evaluation] != maker)
        totals[kind] += problem.storages[storage].bytes
    if op_now.name == EAGER:
        row = BETWEEN_REGIONS
    else:
        row = MEANWHILE if op_now.workspace_bytes and op_now.is_receipt else WORKSPACE
    totals[row] += op_now.workspace_bytes
    return dict(totals)


def kind_of(problem: RematProblem, storage: int, *, first: bool, fetched: bool) -> str:
    """The row of the breakdown in which a live storage counts. `first`: its contents come from the first evaluation of
    its producer, not from a recomputation. `fetched`: its contents were copied back from the host."""
    maker = problem.producer[storage]
    if problem.ops[maker].name == EAGER:
        return BETWEEN_REGIONS
    if problem.storages[storage].home:
        return BROUGHT
    in_forward = maker < problem.forward_ops
    if problem.storages[storage].kept and first:
        return OUTPUTS if in_forward or problem.ops[maker].is_receipt else GRADIENTS
    if fetched:
        return FETCHED
    if not in_forward:
        return TEMPORARIES
    return SAVED if first else RECOMPUTED


def live_versions(problem: RematProblem, schedule: Schedule, position: int) -> Iterator[tuple[int, int]]:
    """The storages alive while evaluation `position` runs. Each comes with the position of the evaluation that made its
    current contents; if these were copied back from the host, with the position before which that copy began."""
    for storage, born, dies in lifetimes(problem, schedule.evaluations, schedule.offloads):
        if born <= position <= dies:
            yield storage, born


def _ordered(rows: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in sorted(rows.items(), key=lambda row: -row[1]) if size)

"""Walks a schedule and counts live bytes: the only judge of feasibility.

It shares no code with the solvers on purpose, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule


@dataclass(frozen=True)
class Simulation:
    """What a schedule costs. Positions count evaluations from 0."""

    peak_bytes: int
    peak_position: int
    """The first evaluation at which the peak is reached; -1 for an empty schedule."""
    seconds: float
    """Of all evaluations."""
    added_seconds: float
    """Of all evaluations beyond each op's first."""
    live_bytes: npt.NDArray[np.int64]
    """Per evaluation: resident bytes, every live version, what the op makes, and its workspace."""


def simulate(problem: RematProblem, schedule: Schedule) -> Simulation:
    """Count the bytes live at each evaluation of `schedule`, and its seconds.

    A read binds to the latest evaluation of the storage's producer; a version dies right after its last read, or right
    after its making when nothing reads it. The first version of a kept storage never dies.

    Raises `ValueError` where the schedule breaks a rule (`Schedule.check`).
    """
    schedule.check(problem)
    evaluations = schedule.evaluations
    if not evaluations:
        return Simulation(problem.resident_bytes, -1, 0.0, 0.0, np.zeros(0, np.int64))
    change = np.zeros(len(evaluations) + 1, np.int64)
    transient = np.zeros(len(evaluations), np.int64)
    for storage, born, dies in _lifetimes(problem, evaluations):
        change[born] += problem.storages[storage].bytes
        change[dies + 1] -= problem.storages[storage].bytes
    for position, op in enumerate(evaluations):
        transient[position] = problem.ops[op].workspace_bytes
    live = problem.resident_bytes + np.cumsum(change[:-1]) + transient
    seconds = sum(problem.ops[op].seconds for op in evaluations)
    peak_position = int(np.argmax(live))
    return Simulation(int(live[peak_position]), peak_position, seconds, schedule.added_seconds(problem), live)


def _lifetimes(problem: RematProblem, evaluations: tuple[int, ...]) -> list[list[int]]:
    """Every version of every storage as [storage, position of its making, last position at which it is live]."""
    versions: list[list[int]] = []
    latest: dict[int, list[int]] = {}
    end = len(evaluations) - 1
    for position, index in enumerate(evaluations):
        op = problem.ops[index]
        for storage in op.reads:
            latest[storage][2] = max(latest[storage][2], position)
        for storage in op.makes:
            keeps = problem.storages[storage].kept and storage not in latest
            latest[storage] = [storage, position, end if keeps else position]
            versions.append(latest[storage])
    return versions

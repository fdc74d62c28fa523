"""The exact solver for small problems: the best schedule of a wide class, by mixed-integer programming.

Schedules consist of stages: a stage recomputes ops in program order, each at most once, and then evaluates one op for
the first time. As in Checkmate (Jain et al., 2020, section 4), with three changes: the live bytes inside a stage are
exact; only the backward has stages unless the forward needs them to fit; and "closure cuts" demand that values read
later are either held when a stage begins or recomputed after it, without which the relaxation proves little.

For larger problems a step of the best effort optimises the recomputations in one stretch of the backward: the storages
in memory before the stretch and those needed after it are fixed, and the rest of the schedule does not change. So the
stretch is a small problem of its own ("large neighbourhood search", Shaw, 1998).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Flags, Ints, arrays_of, remove_dead, to_schedule
from memopt.solver.lower_bound import movable_storages
from memopt.solver.polish import next_reads
from memopt.solver.problem import Op, RematProblem, Schedule, Storage
from memopt.solver.simulator import simulate
from memopt.solver.stage_model import StageModel


@dataclass(frozen=True)
class _ExactResult:
    """The outcome of `solve_exactly`."""

    schedule: Schedule | None
    """The schedule, which fits the budget; None if none was found."""
    added_seconds: float
    """Seconds that the schedule adds; infinite without a schedule."""
    bound_seconds: float
    """A lower bound on the seconds that any schedule of stages adds."""
    proven: bool
    """True if the search was completed: the schedule is optimal within the gap, or none exists."""


def solve_exactly(
    problem: RematProblem,
    budget_bytes: int,
    *,
    seconds: float = 60.0,
    gap_seconds: float | None = None,
    below_seconds: float | None = None,
    nodes: int | None = None,
    variables: int | None = None,
) -> _ExactResult:
    """The fastest schedule of stages with a peak of at most `budget_bytes`, found within `seconds` of wall time.

    `nodes` also limits the search tree, for a result that is the same in every run; problems whose program has more
    than `variables` are left unsolved. The search ends early when the best schedule is within `gap_seconds` of the
    bound (default: 1e-4 of the step). Schedules that add more than `below_seconds` are excluded.
    """
    if problem.forward_ops == len(problem.ops):
        fits = simulate(problem, Schedule.save_all(problem)).peak_bytes <= budget_bytes
        return _ExactResult(Schedule.save_all(problem), 0.0, 0.0, True) if fits else _nothing
    staged = StageModel(problem, budget_bytes)
    if staged.impossible:
        return _nothing
    if variables is not None and staged.model.variables > variables:
        return _ExactResult(None, float("inf"), 0.0, False)
    unit = problem.seconds or 1.0
    gap = _GAP if gap_seconds is None else gap_seconds / unit  # of the cost, which is at most about 1: a step's seconds
    if below_seconds is not None:
        staged.model.cost_at_most(below_seconds / unit)
    values, bound, complete = staged.model.solve(seconds, gap, nodes)
    if values is None:
        return _ExactResult(None, float("inf"), bound * unit, complete)
    schedule = to_schedule(remove_dead(arrays_of(problem), np.array(staged.evaluations(values), np.int64)))
    simulation = simulate(problem, schedule)
    if simulation.peak_bytes > budget_bytes:  # a second version of a kept storage outlived its making
        return _ExactResult(None, float("inf"), bound * unit, False)
    return _ExactResult(schedule, simulation.added_seconds, bound * unit, complete)


_GAP = 1e-4
_nothing = _ExactResult(None, float("inf"), float("inf"), True)


@dataclass(frozen=True)
class Exact:
    """Proposes the exact solver's schedule for problems of at most `most_forward_ops` forward ops, else nothing.

    `nodes` limits the search tree and `variables` the program, so that the schedule is the same in every run and takes
    less than a second. `gap` is the share of the step's seconds by which it may be above the optimum.
    """

    name: str = "exact"
    most_forward_ops: int = 24
    nodes: int = 300
    variables: int = 600
    gap: float = _GAP

    def candidates(self, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
        if problem.forward_ops > self.most_forward_ops:
            return []
        found = solve_exactly(
            problem,
            budget_bytes,
            gap_seconds=self.gap * problem.seconds,
            nodes=self.nodes,
            variables=self.variables,
        ).schedule
        return [] if found is None else [found]


# A window with more recomputed ops than this is too large to be solved in seconds.
_MOST_FORWARD_OPS = 70
# The least gain that counts, as a share of the window's recomputed seconds: well above the solver's tolerance.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True)
class _Window:
    """A stretch `start … stop-1` of a schedule as a problem of its own."""

    start: int
    stop: int
    problem: RematProblem
    entering: frozenset[int]
    """Storages of `problem` that are in memory when the stretch begins."""
    own: tuple[int, ...]
    """For each op of `problem`, the op of the whole step; -1 for ops that stand for the rest of the step."""
    again_seconds: float
    """Seconds of the recomputations that the schedule makes in the stretch."""


def random_window(
    problem: RematProblem, arrays: Arrays, evaluations: Ints, stages: int, draw: np.random.Generator
) -> _Window | None:
    """A window of `stages` first evaluations at a random place of the backward; None if too large or not possible."""
    firsts = np.flatnonzero(evaluations >= problem.forward_ops)
    if firsts.size <= stages:
        return None
    at = int(draw.integers(firsts.size - stages))
    start = int(firsts[at - 1]) + 1 if at else int(firsts[0])
    return window(problem, arrays, evaluations, start, int(firsts[at + stages - 1]) + 1)


def window(problem: RematProblem, arrays: Arrays, evaluations: Ints, start: int, stop: int) -> _Window | None:
    """The stretch `start … stop-1` of a schedule, which must lie in the backward, as a problem; None if too large."""
    inside = evaluations[start:stop].tolist()
    again = sorted({op for op in inside if op < problem.forward_ops})
    if len(again) > _MOST_FORWARD_OPS:
        return None
    movable = movable_storages(problem)
    before, after = next_reads(arrays, evaluations, start) >= 0, next_reads(arrays, evaluations, stop) >= 0
    build = _Builder(problem)
    entering = {s for s in np.flatnonzero(before).tolist() if movable[s]}
    made_before = {s for op in evaluations[:start].tolist() for s in problem.ops[op].makes}
    for storage in sorted(s for s in made_before if not movable[s]):
        if problem.storages[storage].kept or after[storage]:
            build.resident_bytes += problem.storages[storage].bytes
        elif before[storage]:
            build.op(-1, (), (storage,), recomputable=False)
    for op in sorted({*again, *(problem.producer[s] for s in entering)}):
        reads = [s for s in problem.ops[op].reads if movable[s]]
        possible = op in again or (all(s in build.number for s in reads) and problem.ops[op].recomputable)
        makes = [s for s in problem.ops[op].makes if possible or s in entering]
        build.op(op if possible else -1, reads if possible else (), makes, recomputable=possible)
    if len(build.ops) > 2 * _MOST_FORWARD_OPS:
        return None
    forward_ops = len(build.ops)
    for op in inside:
        if op >= problem.forward_ops:
            reads = [s for s in problem.ops[op].reads if s in build.number]
            build.op(op, reads, problem.ops[op].makes, recomputable=False, after=after)
    leaving = [s for s in np.flatnonzero(after).tolist() if movable[s] and s in build.number]
    build.op(-1, leaving, (), recomputable=False)
    seconds = float(sum(problem.ops[op].seconds for op in inside if op < problem.forward_ops))
    small = RematProblem(tuple(build.ops), tuple(build.storages), forward_ops, build.resident_bytes)
    return _Window(start, stop, small, frozenset(build.number[s] for s in entering), tuple(build.own), seconds)


def solved(evaluations: Ints, stretch: _Window, cap_bytes: int, seconds: float) -> Ints | None:
    """The schedule with fewer recomputed seconds in the window; None if none is found in `seconds` of wall time."""
    staged = StageModel(stretch.problem, cap_bytes, stretch.entering)
    if staged.impossible or stretch.again_seconds <= 0:
        return None
    unit = stretch.problem.seconds or 1.0
    staged.model.cost_at_most((1 - _LEAST_GAIN) * stretch.again_seconds / unit)
    values, _, _ = staged.model.solve(seconds, 1e-4)
    if values is None:
        return None
    chosen = [stretch.own[op] for op in staged.evaluations(values)[stretch.problem.forward_ops :]]
    inside = np.array([op for op in chosen if op >= 0], np.int64)
    return np.concatenate((evaluations[: stretch.start], inside, evaluations[stretch.stop :]))


class _Builder:
    """Collects the ops and storages of a window, numbered in the order in which they are added."""

    def __init__(self, problem: RematProblem) -> None:
        self._problem = problem
        self.ops: list[Op] = []
        self.own: list[int] = []
        self.storages: list[Storage] = []
        self.number: dict[int, int] = {}
        self.resident_bytes = problem.resident_bytes

    def op(
        self,
        op: int,
        reads: Sequence[int],
        makes: Sequence[int],
        *,
        recomputable: bool,
        after: Flags | None = None,
    ) -> None:
        """Add op `op` of the step, or -1 for an op that stands for the rest of the step.

        With `after`, a flag per storage of the step, the storages that it makes are kept if they are needed after the
        window.
        """
        for storage in makes:
            self.number[storage] = len(self.storages)
            of_step = self._problem.storages[storage]
            kept = after is not None and bool(of_step.kept or after[storage])
            self.storages.append(Storage(of_step.name, of_step.bytes, kept))
        own = self._problem.ops[op] if op >= 0 else Op("", 0.0, (), ())
        read, made = tuple(self.number[s] for s in reads), tuple(self.number[s] for s in makes)
        self.ops.append(Op(own.name, own.seconds, read, made, own.workspace_bytes, recomputable))
        self.own.append(op)

"""A step of the best effort: optimises the recomputations in one stretch of the backward with the exact solver.

The storages in memory before the stretch and those needed after it are fixed, and the rest of the schedule does not
change. So the stretch is a small problem of its own, in the stages of `StageModel` ("large neighbourhood search", Shaw,
1998).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.held import movable_storages
from memopt.solver.problem import Op, RematProblem, Storage
from memopt.solver.ruin import next_reads
from memopt.solver.stage_model import StageModel

# A window with more recomputed ops than this is too large to be solved in seconds.
_MOST_FORWARD_OPS = 70
# The least gain that counts, as a share of the window's recomputed seconds: well above the solver's tolerance.
_LEAST_GAIN = 1e-3


@dataclass(frozen=True)
class Window:
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
) -> Window | None:
    """A window of `stages` first evaluations at a random place of the backward; None if too large or not possible."""
    firsts = np.flatnonzero(evaluations >= problem.forward_ops)
    if firsts.size <= stages:
        return None
    at = int(draw.integers(firsts.size - stages))
    start = int(firsts[at - 1]) + 1 if at else int(firsts[0])
    return window(problem, arrays, evaluations, start, int(firsts[at + stages - 1]) + 1)


def window(problem: RematProblem, arrays: Arrays, evaluations: Ints, start: int, stop: int) -> Window | None:
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
    return Window(start, stop, small, frozenset(build.number[s] for s in entering), tuple(build.own), seconds)


def solved(evaluations: Ints, stretch: Window, cap_bytes: int, seconds: float) -> Ints | None:
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
        reads: list[int] | tuple[int, ...],
        makes: list[int] | tuple[int, ...],
        *,
        recomputable: bool,
        after: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None,
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
        self.ops.append(
            Op(
                own.name,
                own.seconds,
                tuple(self.number[s] for s in reads),
                tuple(self.number[s] for s in makes),
                own.workspace_bytes,
                recomputable,
            )
        )
        self.own.append(op)

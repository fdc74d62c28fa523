"""A step of the best effort: what is evaluated again in a stretch of the backward, chosen anew by the exact reference.

What is in memory before the stretch is given, what must be there after it too; all else of the schedule stays. The
stretch is then a small problem of its own, in the stages of `StageModel` ("large neighbourhood search", Shaw, 1998).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.held import movable_storages
from memopt.solver.problem import Op, RematProblem, Storage
from memopt.solver.ruin import next_reads
from memopt.solver.stage_model import StageModel

# More ops to evaluate again than this make a window too large to be solved in seconds.
_MOST_FORWARD_OPS = 70
# As a share of what is evaluated again in the window: well above the tolerance of the mixed-integer solver.
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
    """For each op of `problem` the step's; -1 for what stands for the rest of the step."""
    again_seconds: float
    """Of what the schedule evaluates again there."""


def random_window(
    problem: RematProblem, arrays: Arrays, evaluations: Ints, stages: int, draw: np.random.Generator
) -> Window | None:
    """The window of `stages` first evaluations from a random one of the backward; None where it is too large."""
    firsts = np.flatnonzero(evaluations >= problem.forward_ops)
    if firsts.size <= stages:
        return None
    at = int(draw.integers(firsts.size - stages))
    start = int(firsts[at - 1]) + 1 if at else int(firsts[0])
    return window(problem, arrays, evaluations, start, int(firsts[at + stages - 1]) + 1)


def window(problem: RematProblem, arrays: Arrays, evaluations: Ints, start: int, stop: int) -> Window | None:
    """The stretch of a schedule, which must lie in the backward, as a problem; None where it is too large."""
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
    """The schedule with the least evaluated again in the window; None where nothing better is found in `seconds`."""
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
    """Ops and storages of a window, numbered as they come."""

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
        """Add the step's op (-1: none). What it makes is kept if it is `after` the window."""
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

"""The protocol of a solver, built in or a user's: it takes a problem and a budget and proposes schedules. A user's
solver is called once for each budget, and its schedules are checked.

Here, too: the usual recipes of activation checkpointing, each with one schedule for all budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isqrt
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from memopt.solver.chain import crossing_bytes, last_forward_readers
from memopt.solver.min_cut import just_in_time, needed_by_backward
from memopt.solver.problem import RematProblem, Schedule


class Infeasible(Exception):
    """Raised where no schedule with a peak within the budget was found.

    `smallest_peak_bytes` is the smallest budget known to work, `floor_bytes` a lower bound on the peak of every
    schedule, and `dominating_op` the index of the op that sets this bound.
    """

    def __init__(self, smallest_peak_bytes: int, floor_bytes: int, dominating_op: int) -> None:
        self.smallest_peak_bytes = smallest_peak_bytes
        self.floor_bytes = floor_bytes
        self.dominating_op = dominating_op
        super().__init__(
            f"no schedule fits the budget: the smallest peak found is {smallest_peak_bytes} bytes, "
            f"and no schedule can go below {floor_bytes} bytes, which op {dominating_op} needs"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.smallest_peak_bytes, self.floor_bytes, self.dominating_op)


Effort = Literal["fast", "default", "best"]


@dataclass(frozen=True)
class Solution:
    """A schedule within a budget, with the bytes and seconds that the simulator measured."""

    schedule: Schedule
    peak_bytes: int
    added_seconds: float
    lower_bound_seconds: float
    """A lower bound on the seconds that any schedule within the budget adds."""
    method: str
    """The solver that proposed the schedule and, after commas, how it was improved."""


@dataclass(frozen=True)
class Baseline:
    """The cost of a usual recipe of checkpointing, whether or not it fits a budget."""

    name: str
    peak_bytes: int
    added_seconds: float


class SolverError(ValueError):
    """Raised where a user's solver fails, or proposes an invalid schedule; the message names the solver."""


# At most this many candidates are read from one solver, so that an endless generator ends.
MOST_CANDIDATES = 1_000


@runtime_checkable
class Solver(Protocol):
    """Proposes schedules of a problem; the simulator measures them and `Portfolio` takes the fastest that fits.

    A solver may propose schedules that do not fit the budget: they are starting points for repair. It should be
    deterministic, because the same training call must get the same plan in every process.
    """

    @property
    def name(self) -> str:
        """The name that `Solution.method` reports if this solver's schedule wins; it must not contain a comma."""
        ...

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterable[Schedule]:
        """The schedules of `problem` that the solver proposes, preferably with a peak of at most `budget_bytes`; none
        if it finds none. The simulator judges them."""
        ...


def check_solver(solver: object) -> None:
    """Raises `SolverError` for anything but a solver."""
    if isinstance(solver, type):
        raise SolverError(f"{solver.__name__} is a class, not a solver: give an instance, {solver.__name__}()")
    if not isinstance(solver, Solver) or not callable(solver.candidates):
        raise SolverError(f"{solver!r} is not a solver: it needs a `name` and `candidates(problem, budget_bytes)`")
    if not isinstance(solver.name, str) or not solver.name or "," in solver.name:
        raise SolverError(f"a solver's name is a non-empty string without commas, not {solver.name!r}")


def proposals(solver: Solver, problem: RematProblem, budget_bytes: int) -> Iterator[Schedule]:
    """The first `MOST_CANDIDATES` schedules that a solver proposes. Raises `SolverError`, with the solver's name, if it
    raises or proposes anything but valid schedules."""
    try:
        candidates = list(islice(solver.candidates(problem, budget_bytes), MOST_CANDIDATES))
    except Exception as error:
        raise SolverError(f"solver {solver.name!r} raised {type(error).__name__}: {error}") from error
    for schedule in candidates:
        if not isinstance(schedule, Schedule):
            kind = type(schedule).__name__
            raise SolverError(f"solver {solver.name!r} proposed a value of type {kind}, not a memopt.solver.Schedule")
        try:
            plain = Schedule(tuple(map(int, schedule.evaluations)), tuple(schedule.offloads))
            plain.check(problem)
        except Exception as error:
            raise SolverError(f"solver {solver.name!r} proposed an invalid schedule of the problem: {error}") from error
        yield plain


def recipes(problem: RematProblem) -> dict[str, Schedule]:
    """The usual recipes of activation checkpointing that apply to the problem, by name: save everything, like training
    without checkpointing, which comes first; checkpoint blocks (Chen et al., 2016); recompute only the attention cores
    (`Op.attention`). Only the first where nothing can be recomputed."""
    found = {"save all": Schedule.save_all(problem)}
    forward = problem.ops[: problem.forward_ops]
    if not any(op.recomputable for op in forward):
        return found
    blocks = forward_blocks(problem)
    count = max(blocks, default=-1) + 1
    if count > 1:
        sizes = {"per block": 1, **{f"every {every} blocks": every for every in _group_sizes(count)}}
        sizes["sqrt(L) segments"] = -(-count // isqrt(count))
        found |= {name: checkpointed(problem, blocks, every) for name, every in sizes.items()}
    if any(op.attention for op in forward):
        saved = _saved_unless(problem, lambda op: problem.ops[op].attention)
        found["attention only"] = just_in_time(problem, saved)
    return found


def checkpointed(problem: RematProblem, blocks: list[int], every: int) -> Schedule:
    """The schedule that saves the inputs of each group of `every` blocks, as `torch.utils.checkpoint` around the group
    does. Results of ops outside of blocks are saved as well. `blocks` has each forward op's block, -1 for none."""
    group = [block // every if block >= 0 else -1 for block in blocks]
    saved = _saved_unless(problem, lambda op: group[op] >= 0)
    crossing = {
        storage
        for index, op in enumerate(problem.ops[: problem.forward_ops])
        for storage in op.reads
        if group[problem.producer[storage]] != group[index]
    }
    return just_in_time(problem, saved | crossing)


def forward_blocks(problem: RematProblem) -> list[int]:
    """For each forward op its block, numbered from 0 in order of appearance, or -1. If no op has a block, the forward
    is cut into segments where few bytes cross, and these are used as blocks."""
    forward = problem.ops[: problem.forward_ops]
    number: dict[int, int] = {}
    for op in forward:
        if op.block >= 0:
            number.setdefault(op.block, len(number))
    if number:
        return [number.get(op.block, -1) for op in forward]
    starts = _segment_starts(problem)
    return [int(np.searchsorted(starts, index, "right")) - 1 for index in range(len(forward))]


def _saved_unless(problem: RematProblem, recomputed: Callable[[int], bool]) -> set[int]:
    """The storages to save: those that the backward or recomputed ops read, except those that recomputed ops make."""
    wanted = set(needed_by_backward(problem))
    for index, op in enumerate(problem.ops[: problem.forward_ops]):
        if recomputed(index):
            wanted.update(op.reads)
    return {storage for storage in wanted if not recomputed(problem.producer[storage])}


def _group_sizes(count: int) -> list[int]:
    """The group sizes 2, 3, 4, 6, 8, 12, … up to half of `count` blocks, so that there are at least two groups."""
    sizes = sorted({2**i for i in range(1, 12)} | {3 * 2**i for i in range(11)})
    return [size for size in sizes if 2 * size <= count]


def _segment_starts(problem: RematProblem) -> list[int]:
    """Ops at which segments of the forward begin: local minima of the crossing bytes in their lowest three tenths."""
    crossing = crossing_bytes(problem, last_forward_readers(problem))
    inner = crossing[1:]
    if inner.size == 0:
        return [0]
    falls = inner <= np.minimum(crossing[:-1], np.quantile(inner, 0.3))
    next_crossing = np.append(crossing[2:], crossing[-1])
    lowest = np.flatnonzero(falls & (inner < next_crossing))
    if lowest.size < 2:  # a uniform chain has no strict minima: any of its ops may begin a segment
        lowest = np.flatnonzero(falls & (inner <= next_crossing))
    return [0, *(1 + lowest).tolist()]

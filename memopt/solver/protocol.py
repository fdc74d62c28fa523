"""The protocol of a solver, built in or a user's: it takes a problem and a budget and proposes schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from memopt.solver.errors import SolverError
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule

# At most this many candidates are read from one solver, so that an endless generator ends.
MOST_CANDIDATES = 1_000


@runtime_checkable
class Solver(Protocol):
    """Proposes schedules of a problem; the simulator measures them and `Portfolio` takes the fastest that fits.

    A solver may propose schedules that do not fit the budget: they are starting points for repair. It should be
    deterministic, because the same job must get the same plan in every process.
    """

    @property
    def name(self) -> str:
        """The name that `Solution.method` reports if this solver's schedule wins; it must not contain a comma."""
        ...

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterable[Schedule]:
        """Schedules of `problem`, preferably with a peak of at most `budget_bytes`; may be empty."""
        ...


def checked_solvers(solvers: Sequence[Solver]) -> tuple[Solver, ...]:
    """The solvers as a tuple. Raises `SolverError` if one does not follow the protocol."""
    for solver in solvers:
        if isinstance(solver, type):
            raise SolverError(f"{solver.__name__} is a class, not a solver: give an instance, {solver.__name__}()")
        if not isinstance(solver, Solver) or not callable(solver.candidates):
            raise SolverError(f"{solver!r} is not a solver: it needs a `name` and `candidates(problem, budget_bytes)`")
        if not isinstance(solver.name, str) or not solver.name or "," in solver.name:
            raise SolverError(f"a solver's name is a non-empty string without commas, not {solver.name!r}")
    return tuple(solvers)


def proposed(solver: Solver, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
    """The first `MOST_CANDIDATES` schedules that a user's solver proposes, each checked with `Schedule.check`.

    Raises `SolverError` with the solver's name if the solver raises or proposes anything but valid schedules.
    """
    try:
        candidates = list(islice(solver.candidates(problem, budget_bytes), MOST_CANDIDATES))
    except Exception as error:
        raise SolverError(f"solver {solver.name!r} raised {type(error).__name__}: {error}") from error
    return [_checked(solver, problem, schedule) for schedule in candidates]


def _checked(solver: Solver, problem: RematProblem, schedule: object) -> Schedule:
    """The proposed schedule with plain integers. Raises `SolverError` if it is not a valid schedule of the problem."""
    if not isinstance(schedule, Schedule):
        kind = type(schedule).__name__
        raise SolverError(f"solver {solver.name!r} proposed a value of type {kind}, not a memopt.solver.Schedule")
    try:
        plain = Schedule(tuple(map(int, schedule.evaluations)), tuple(schedule.offloads))
        plain.check(problem)
    except Exception as error:
        raise SolverError(f"solver {solver.name!r} proposed an invalid schedule of the problem: {error}") from error
    return plain

"""What a solver is, ours or a user's: a problem and a budget in, candidate schedules out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from memopt.solver.errors import SolverError
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule

# More candidates of one solver than this are not read, so that an endless generator ends.
MOST_CANDIDATES = 1_000


@runtime_checkable
class Solver(Protocol):
    """Proposes schedules of a problem; the simulator judges them and `Portfolio` takes the fastest that fits.

    A solver may propose schedules that do not fit the budget: they are starting points for repair. It should be
    deterministic, as the same job must get the same plan in every process.
    """

    @property
    def name(self) -> str:
        """What `Solution.method` says where this solver's schedule won; no comma in it."""
        ...

    def candidates(self, problem: RematProblem, budget_bytes: int) -> Iterable[Schedule]:
        """Schedules of `problem`, best within `budget_bytes`; none where the solver knows none."""
        ...


def checked_solvers(solvers: Sequence[Solver]) -> tuple[Solver, ...]:
    """The solvers as a tuple. Raises `SolverError` for what is not a solver."""
    for solver in solvers:
        if isinstance(solver, type):
            raise SolverError(f"{solver.__name__} is a class, not a solver: give an instance, {solver.__name__}()")
        if not isinstance(solver, Solver) or not callable(solver.candidates):
            raise SolverError(f"{solver!r} is not a solver: it needs a `name` and `candidates(problem, budget_bytes)`")
        if not isinstance(solver.name, str) or not solver.name or "," in solver.name:
            raise SolverError(f"a solver's name is a non-empty string without commas, not {solver.name!r}")
    return tuple(solvers)


def proposed(solver: Solver, problem: RematProblem, budget_bytes: int) -> list[Schedule]:
    """The first `MOST_CANDIDATES` schedules that a user's solver proposes, each checked against the problem's rules.

    Raises `SolverError` with the solver's name where it raises, and where it proposes anything but such schedules.
    """
    try:
        candidates = list(islice(solver.candidates(problem, budget_bytes), MOST_CANDIDATES))
    except Exception as error:
        raise SolverError(f"solver {solver.name!r} raised {type(error).__name__}: {error}") from error
    return [_checked(solver, problem, schedule) for schedule in candidates]


def _checked(solver: Solver, problem: RematProblem, schedule: object) -> Schedule:
    if not isinstance(schedule, Schedule):
        kind = type(schedule).__name__
        raise SolverError(f"solver {solver.name!r} proposed a value of type {kind}, not a memopt.solver.Schedule")
    try:
        plain = Schedule(tuple(map(int, schedule.evaluations)), tuple(schedule.offloads))
        plain.check(problem)
    except Exception as error:
        raise SolverError(f"solver {solver.name!r} proposed what is no schedule of the problem: {error}") from error
    return plain

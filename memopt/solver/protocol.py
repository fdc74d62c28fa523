"""The protocol of a solver, built in or a user's: it takes a problem and a budget and proposes schedules. A user's are
checked, and called once for each budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Schedule


class Infeasible(Exception):
    """No schedule with a peak within the budget was found.

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


class SolverError(ValueError):
    """A user's solver raised, or proposed something other than a valid schedule; the message names the solver."""


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


class UserSolvers:
    """A user's solvers for one problem. Raises `SolverError` if one does not follow the protocol."""

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver]) -> None:
        self.solvers = checked_solvers(solvers)
        self._problem = problem
        self._last: tuple[int, list[tuple[str, Schedule]]] | None = None

    def at(self, budget_bytes: int) -> list[tuple[str, Schedule]]:
        """All proposals at a budget, as pairs (solver's name, schedule), in the order of the solvers.

        The last budget's proposals are cached. Raises `SolverError` if a solver raises or proposes anything but valid
        schedules.
        """
        if self._last is None or self._last[0] != budget_bytes:
            pairs = [(s.name, plan) for s in self.solvers for plan in proposed(s, self._problem, budget_bytes)]
            self._last = (budget_bytes, pairs)
        return self._last[1]

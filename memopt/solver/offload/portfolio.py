"""The portfolio of solvers that save, recompute and offload.

Most transfers hide behind compute entirely, as in FlashNeuron (Bae et al., 2021) and POFO (Beaumont et al., 2021);
schedules in which compute waits are chosen if that costs less than recomputation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import get_args

import numpy as np

from memopt.solver.arrays import Floats, arrays_of
from memopt.solver.liveness import to_array
from memopt.solver.offload.bound import OffloadBound, transient_floor
from memopt.solver.offload.larger_budgets import LargerBudgets
from memopt.solver.offload.place import Placer
from memopt.solver.offload.search import OffloadCandidate, OffloadSearch
from memopt.solver.portfolio import Effort, Portfolio, Solution
from memopt.solver.problem import Link, RematProblem
from memopt.solver.protocol import Infeasible, Solver
from memopt.solver.schedule import Offload, Schedule
from memopt.solver.simulator import simulate

# Evaluations that the placements of a local search may go through: half a second's worth.
_EXPLORED = 400_000
# The search ends when the best plan is this close to the lower bound, as a share of the step's seconds.
_CLOSE_ENOUGH = 1e-4


@dataclass(frozen=True)
class OffloadSolution(Solution):
    """A schedule within a budget over a link, as the simulator measured it; `added_seconds` includes all waits."""

    stall_seconds: float
    """Seconds for which compute waits for transfers."""
    host_bytes: int
    """The most bytes on the host at one time."""


class OffloadPortfolio:
    """Solves one problem at any number of budgets and links.

    A solution fits its budget and the host's limit. It adds no more seconds than the portfolio's solution without
    offloads, and no more than any solution found before for a smaller budget. Without bandwidth it is the portfolio's.

    `portfolio` finds the schedules without offloads; None makes a new one with a user's `solvers`. The schedules with
    offloads that these propose are offered here, the others in the portfolio.
    """

    def __init__(
        self, problem: RematProblem, portfolio: Portfolio | None = None, solvers: Sequence[Solver] = ()
    ) -> None:
        assert portfolio is None or not solvers, "the solvers of a given portfolio are asked: give them to it"
        self._problem = problem
        self._portfolio = portfolio or Portfolio(problem, solvers)
        self._arrays = arrays_of(problem)
        self._bound = OffloadBound(problem)
        self._larger = LargerBudgets(problem, self._arrays, self._portfolio)
        self._found: list[tuple[int, OffloadCandidate]] = []

    def solve(
        self,
        budget_bytes: int,
        link: Link,
        effort: Effort = "default",
        *,
        plain: Solution | None = None,
        limit_seconds: float = 60.0,
    ) -> OffloadSolution:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`, over `link`.

        `effort` is as in `Portfolio.solve`; "best" searches for up to `limit_seconds`, half of them with offloads.
        `plain` is the portfolio's solution for this budget without offloads; with None the portfolio is asked for it.

        Raises `Infeasible` if no schedule is found, with the smallest peak that works, and `ValueError` for another
        effort.
        """
        if effort not in get_args(Effort):
            raise ValueError(f'effort is "fast", "default" or "best", not {effort!r}')
        bound = self._bound.added_seconds(budget_bytes, link)
        refused: Infeasible | None = None
        if plain is None:
            try:
                plain = self._portfolio.solve(budget_bytes, effort, limit_seconds=limit_seconds / 2)
            except Infeasible as infeasible:
                refused = infeasible
        search = self._new_search(budget_bytes, link)
        if plain is not None:
            search.offer(_without_offloads(plain))
        for name, schedule in self._portfolio.users.at(budget_bytes):
            if schedule.offloads:
                self._offer_proposed(search, name, schedule, budget_bytes, link)
        if link.bytes_per_second > 0 and (plain is None or not self._is_close(search, bound)):
            self._improve(search, budget_bytes, link, plain, effort, bound, limit_seconds / 2)
        if search.best is None:
            assert refused is not None
            if link.bytes_per_second == 0:
                raise refused
            raise Infeasible(self._smallest_peak(link), *transient_floor(self._problem)) from refused
        self._found.append((budget_bytes, search.best))
        return self._judged(search.best, budget_bytes, link, bound)

    def smallest(self, link: Link) -> OffloadSolution:
        """The schedule with the smallest peak found: with enough room on the host, the largest need of one op."""
        self._portfolio.build_on_smallest()
        return self.solve(self._smallest_peak(link), link, "fast")

    def _improve(
        self,
        search: OffloadSearch,
        budget_bytes: int,
        link: Link,
        plain: Solution | None,
        effort: Effort,
        bound: float,
        limit_seconds: float,
    ) -> None:
        """Offer earlier solutions and plans for larger budgets, with offloads, then search around the best."""
        for found_for, plan in self._found:
            if found_for <= budget_bytes:
                search.offer_again(plan)
        self._larger.improve(search, budget_bytes, link, plain, quickly=effort == "fast")
        if effort == "fast" or search.best is None:
            return
        search.drop(_EXPLORED)
        search.explore(_EXPLORED)
        started = time.monotonic()
        while effort == "best" and time.monotonic() - started < limit_seconds and not self._is_close(search, bound):
            search.explore(_EXPLORED)

    def _offer_proposed(
        self, search: OffloadSearch, name: str, schedule: Schedule, budget_bytes: int, link: Link
    ) -> None:
        """Offer a user's schedule with offloads if it fits the budget and the host in the simulator."""
        try:
            simulation = simulate(self._problem, schedule, link)
        except ValueError:  # it puts more bytes on the host than the link allows
            return
        if simulation.peak_bytes <= budget_bytes and math.isfinite(simulation.added_seconds):
            offloads = np.array([astuple(offload) for offload in schedule.offloads], np.int64)
            search.offer(OffloadCandidate(name, to_array(schedule), offloads, simulation.added_seconds))

    def _new_search(self, cap_bytes: int, link: Link) -> OffloadSearch:
        return OffloadSearch(self._arrays, cap_bytes, self._transfer_seconds(link), link.host_bytes)

    def _transfer_seconds(self, link: Link) -> Floats:
        return np.array([link.transfer_seconds(storage.bytes) for storage in self._problem.storages], np.float64)

    def _is_close(self, search: OffloadSearch, bound: float) -> bool:
        assert search.best is not None
        return search.best.added_seconds <= bound + _CLOSE_ENOUGH * self._problem.seconds

    def _smallest_peak(self, link: Link) -> int:
        """The smallest peak in bytes for which offloads can be placed, found by bisection."""
        high, low = self._portfolio.smallest().peak_bytes, transient_floor(self._problem)[0]
        if link.bytes_per_second == 0:
            return high
        seeds = [to_array(Schedule.save_all(self._problem)), to_array(self._portfolio.smallest().schedule)]
        placers = [Placer(self._arrays, evaluations) for evaluations in seeds]
        nothing = np.zeros(len(self._problem.storages))
        while low < high:
            middle = (low + high) // 2
            if any(placer.place(middle, nothing, link.host_bytes) is not None for placer in placers):
                high = middle
            else:
                low = middle + 1
        return high

    def _judged(self, plan: OffloadCandidate, budget_bytes: int, link: Link, bound: float) -> OffloadSolution:
        """The plan as a solution, simulated; the simulator must confirm that it fits."""
        schedule = Schedule(tuple(plan.evaluations.tolist()), tuple(Offload(*row) for row in plan.offloads.tolist()))
        simulation = simulate(self._problem, schedule, link)
        assert simulation.peak_bytes <= budget_bytes, "the solvers and the simulator disagree"
        return OffloadSolution(
            schedule,
            simulation.peak_bytes,
            simulation.added_seconds,
            bound,
            plan.method,
            simulation.stall_seconds,
            simulation.host_bytes,
        )


def _without_offloads(solution: Solution) -> OffloadCandidate:
    """The portfolio's solution as a candidate with no offloads."""
    nothing = np.zeros((0, 5), np.int64)
    return OffloadCandidate(solution.method, to_array(solution.schedule), nothing, solution.added_seconds)

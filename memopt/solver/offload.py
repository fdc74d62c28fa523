"""The portfolio of solvers that save, recompute and offload.

Most transfers hide behind compute entirely, as in FlashNeuron (Bae et al., 2021) and POFO (Beaumont et al., 2021);
schedules in which compute waits are chosen if that costs less than recomputation.

Plans made for larger budgets are fitted into a budget by offloading some of the values that they save.

If H bytes can be on the host and their transfers hide behind compute, a budget of B bytes is as good as one of B + H
bytes. The largest such H is found by bisection. The cuts that save, offload or recompute (`offload_bound`) are tried
too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import get_args

import numpy as np

from memopt.solver.arrays import Arrays, Floats, Ints, arrays_of, peak_bytes, to_array
from memopt.solver.min_cut import Cut, CutNetwork, just_in_time, lower_hull
from memopt.solver.offload_bound import OffloadBound, offload_cuts, transient_floor
from memopt.solver.offload_place import Placer
from memopt.solver.offload_search import OffloadCandidate, OffloadSearch
from memopt.solver.polish import polish
from memopt.solver.portfolio import Portfolio
from memopt.solver.problem import Link, Offload, RematProblem, Schedule
from memopt.solver.protocol import Effort, Infeasible, Solution, Solver
from memopt.solver.search import Candidate, candidate
from memopt.solver.simulator import simulate

_BISECTIONS = 7
# If no plan fits without offloads: budgets to try, as shares of the way from the smallest peak to saving everything.
_DEEP_SHARES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6)
# For problems with at most this many ops the portfolio solves each budget tried, and the last one with more effort.
_SMALL_OPS = 4_000


class _LargerBudgets:
    """Plans for larger budgets of one problem; work that does not depend on budget and link is done once."""

    def __init__(self, problem: RematProblem, arrays: Arrays, portfolio: Portfolio) -> None:
        self._problem = problem
        self._arrays = arrays
        self._portfolio = portfolio
        self._save_all = to_array(Schedule.save_all(problem))

    def improve(
        self, search: OffloadSearch, budget_bytes: int, link: Link, plain: Solution | None, quickly: bool
    ) -> None:
        """Offer plans for larger budgets, with offloads, to `search`, which is for this budget and link.

        `plain` is the portfolio's solution within the budget, or None if it has none. With `quickly` only the bisection
        is done.
        """
        search.consider("save all", self._save_all)
        seeds = self._seeds(search, plain)
        larger_bytes = self._raise_budget(search, seeds, budget_bytes if plain is not None else None, link)
        if quickly:
            return
        for evaluations in self._three_way(link):
            search.consider("three-way cut", polish(self._arrays, evaluations, peak_bytes(self._arrays, evaluations)))
        above = self._portfolio.solve(larger_bytes, "default" if self._is_small else "fast")
        search.consider(f"{above.method}, offloaded", to_array(above.schedule))

    def _seeds(self, search: OffloadSearch, plain: Solution | None) -> list[Candidate]:
        """The plans without offloads to start from: those of the hull and, last, `plain` or the smallest.

        If `plain` is None, or does without the storages at home, each of them is also offered to `search`, with
        offloads.
        """
        seeds = [*self._hull_plans, _as_candidate(self._arrays, plain or self._portfolio.smallest())]
        for plan in seeds if plain is None or self._problem.home_bytes else ():
            search.consider(f"{plan.method}, offloaded", plan.evaluations)
        return seeds

    def _raise_budget(self, search: OffloadSearch, seeds: list[Candidate], budget_bytes: int | None, link: Link) -> int:
        """Offer plans for larger budgets, with offloads; returns the largest budget that passed `_bring_below`.

        Budgets are chosen by bisection. `budget_bytes` is None if there is no plan without offloads: they then start at
        the smallest peak.
        """
        most = peak_bytes(self._arrays, self._save_all)
        if budget_bytes is None:
            low = self._portfolio.smallest().peak_bytes
            tried = [int(low + share * (most - low)) for share in _DEEP_SHARES]
            last = max((i for i, larger in enumerate(tried) if self._bring_below(search, seeds, larger)), default=0)
            low, high = tried[last], [*tried, most][last + 1]
        else:
            low = budget_bytes
            high = int(min(most, low + link.bytes_per_second * self._problem.seconds))
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            if self._bring_below(search, seeds, middle):
                low = middle
            else:
                high = middle
        return low

    def _bring_below(self, search: OffloadSearch, seeds: list[Candidate], larger_bytes: int) -> bool:
        """Offer the fastest plans known for a larger budget, brought below the search's cap by offloads.

        Returns whether one became the best, or the fastest of them recomputes too much to become it: then a still
        larger budget may help. False if no plan fits `larger_bytes`.
        """
        fitting = sorted((p for p in seeds if p.peak_bytes <= larger_bytes), key=lambda plan: plan.added_seconds)
        if not fitting:
            return False
        polished = [
            candidate(self._arrays, plan.method, polish(self._arrays, plan.evaluations, larger_bytes))
            for plan in (*fitting[:2], seeds[-1])
            if plan.peak_bytes <= larger_bytes
        ]
        if self._is_small:
            polished.append(_as_candidate(self._arrays, self._portfolio.solve(larger_bytes, "fast")))
        before = search.best
        least, *others = sorted(polished, key=lambda plan: plan.added_seconds)
        goes_on = search.consider(f"{least.method}, offloaded", least.evaluations)
        for plan in others:
            search.consider(f"{plan.method}, offloaded", plan.evaluations)
        return goes_on or search.best is not before

    @property
    def _is_small(self) -> bool:
        """Whether the problem has few enough ops for the portfolio to solve it at many budgets."""
        return len(self._problem.ops) <= _SMALL_OPS

    @cached_property
    def _network(self) -> CutNetwork:
        return CutNetwork(self._problem)

    @cached_property
    def _hull(self) -> tuple[Cut, ...]:
        return lower_hull(self._network, limit=16)

    @cached_property
    def _hull_plans(self) -> list[Candidate]:
        schedules = (just_in_time(self._problem, cut.saved) for cut in self._hull)
        return [candidate(self._arrays, "minimum cut", to_array(schedule)) for schedule in schedules]

    def _three_way(self, link: Link) -> list[Ints]:
        """The just-in-time schedules of the cuts that save, offload or recompute."""
        forward = sum(op.seconds for op in self._problem.ops[: self._problem.forward_ops])
        capacity_seconds = min(forward, self._problem.seconds - forward)  # out in the one, back in the other
        cuts = offload_cuts(self._problem, self._network, self._hull, link, capacity_seconds)
        return [to_array(just_in_time(self._problem, cut.saved)) for cut in cuts]


def _as_candidate(arrays: Arrays, solution: Solution) -> Candidate:
    return candidate(arrays, solution.method, to_array(solution.schedule))


# The most evaluations of all schedules together that one local search tries: about half a second.
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
    offloads, and no more than any solution found before for a smaller budget. Over a link without bandwidth nothing is
    offloaded.

    `portfolio` finds the schedules without offloads; None makes a new one with a user's `solvers`. Schedules with
    offloads that these propose compete here, the others in the portfolio.
    """

    def __init__(
        self, problem: RematProblem, portfolio: Portfolio | None = None, solvers: Sequence[Solver] = ()
    ) -> None:
        assert portfolio is None or not solvers, (
            "give solvers to OffloadPortfolio or to the portfolio that it is given, not to both"
        )
        self._problem = problem
        self._portfolio = portfolio or Portfolio(problem, solvers)
        self._arrays = arrays_of(problem)
        self._bound = OffloadBound(problem)
        self._larger = _LargerBudgets(problem, self._arrays, self._portfolio)
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
        `plain` is the portfolio's solution for this budget without offloads; with None it is solved for here.

        Raises `Infeasible` if no schedule is found, with the smallest peak that works, and `ValueError` for another
        effort."""
        if effort not in get_args(Effort):
            raise ValueError(f'effort is "fast", "default" or "best", not {effort!r}')
        bound = self._bound.added_seconds(budget_bytes, link)
        refused: Infeasible | None = None
        if plain is None:
            try:
                plain = self._portfolio.solve(budget_bytes, effort, limit_seconds=limit_seconds / 2)
            except Infeasible as infeasible:
                refused = infeasible
        search = OffloadSearch(self._arrays, budget_bytes, self._transfer_seconds(link), link.host_bytes)
        if plain is not None and not self._problem.home_bytes:  # `plain` never copies storages at home to the device
            nothing = np.zeros((0, 5), np.int64)
            search.offer(OffloadCandidate(plain.method, to_array(plain.schedule), nothing, plain.added_seconds))
        for name, schedule in self._portfolio.users.at(budget_bytes):
            if schedule.offloads:
                self._offer_proposed(search, name, schedule, budget_bytes, link)
        if link.bytes_per_second > 0 and (search.best is None or not self._is_close(search, bound)):
            self._improve(search, budget_bytes, link, plain, effort, bound, limit_seconds / 2)
        if search.best is None:
            if link.bytes_per_second == 0 and refused is not None:
                raise refused
            raise Infeasible(self._smallest_peak(link), *transient_floor(self._problem)) from refused
        self._found.append((budget_bytes, search.best))
        return self._judged(search.best, budget_bytes, link, bound)

    def smallest(self, link: Link) -> OffloadSolution:
        """The schedule with the smallest peak found; with enough room on the host, its peak is that of
        `transient_floor`."""
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
        except ValueError:  # more bytes on the host than the link allows
            return
        brought = {offload.storage for offload in schedule.offloads if self._problem.storages[offload.storage].home}
        missing = sum(storage.home for storage in self._problem.storages) > len(brought)
        if simulation.peak_bytes <= budget_bytes and math.isfinite(simulation.added_seconds) and not missing:
            offloads = np.array([astuple(offload) for offload in schedule.offloads], np.int64)
            search.offer(OffloadCandidate(name, to_array(schedule), offloads, simulation.added_seconds))

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
        assert simulation.peak_bytes <= budget_bytes, "the simulated peak exceeds the budget"
        return OffloadSolution(
            schedule,
            simulation.peak_bytes,
            simulation.added_seconds,
            bound,
            plan.method,
            simulation.stall_seconds,
            simulation.host_bytes,
        )

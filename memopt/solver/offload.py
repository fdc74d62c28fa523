"""The portfolio of solvers that save, recompute and offload.

Most transfers hide behind compute entirely, as in FlashNeuron (Bae et al., 2021) and POFO (Beaumont et al., 2021);
schedules in which compute waits are chosen if that costs less than recomputation.

Plans made for larger budgets are fitted into a budget by offloading some of the values that they save. If H bytes can
be on the host and their transfers hide behind compute, a budget of B bytes is as good as one of B + H bytes. The
largest such H is found by bisection. The cuts that save, offload or recompute (`offload_cuts`) are tried too.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np

from memopt.solver.arrays import arrays_of, peak_bytes, to_array
from memopt.solver.lower_bound import LowerBound, floor_of
from memopt.solver.min_cut import Cut, CutNetwork, just_in_time, lower_hull, offload_cuts
from memopt.solver.offload_place import Placer
from memopt.solver.offload_search import OffloadCandidate, OffloadSearch
from memopt.solver.polish import polish
from memopt.solver.portfolio import CLOSE_ENOUGH, Portfolio
from memopt.solver.problem import Link, Offload, RematProblem, Schedule
from memopt.solver.protocol import Effort, Infeasible, Solution
from memopt.solver.search import Candidate, candidate
from memopt.solver.simulator import simulate

_BISECTIONS = 7
# If no plan fits without offloads: budgets to try, as shares of the way from the smallest peak to saving everything.
_DEEP_SHARES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6)
# For problems with at most this many ops the portfolio solves each budget tried, and the last one with more effort.
_SMALL_OPS = 4_000
# The most evaluations of all schedules together that one local search tries: about half a second.
_EXPLORED = 400_000


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

    `portfolio` finds the schedules without offloads; None makes a new one. Schedules with offloads that its users'
    solvers propose compete here.
    """

    def __init__(self, problem: RematProblem, portfolio: Portfolio | None = None) -> None:
        self._problem = problem
        self._portfolio = portfolio or Portfolio(problem)
        self._arrays = arrays_of(problem)
        self._is_small = len(problem.ops) <= _SMALL_OPS
        self._bound = self._portfolio.bound
        if problem.home_bytes:  # they may be off the device at any time, so only a bound without their bytes holds
            there = (replace(storage, bytes=0) if storage.home else storage for storage in problem.storages)
            self._bound = LowerBound(replace(problem, storages=tuple(there)))
        self._save_all = to_array(Schedule.save_all(problem))
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
        search = OffloadSearch(self._arrays, budget_bytes, link, bound + CLOSE_ENOUGH * self._problem.seconds)
        if plain is not None and not self._problem.home_bytes:  # `plain` never copies storages at home to the device
            nothing = np.zeros((0, 5), np.int64)
            search.offer(OffloadCandidate(plain.method, to_array(plain.schedule), nothing, plain.added_seconds))
        for name, schedule in self._portfolio.users_schedules(budget_bytes):
            if schedule.offloads:
                self._offer_proposed(search, name, schedule)
        if link.bytes_per_second > 0 and not search.done:
            self._improve(search, plain, effort, limit_seconds / 2)
        if search.best is None:
            if link.bytes_per_second == 0 and refused is not None:
                raise refused
            raise Infeasible(self._smallest_peak(link), *floor_of(self._problem, offloading=True)) from refused
        self._found.append((budget_bytes, search.best))
        return self._judged(search.best, budget_bytes, link, bound)

    def smallest(self, link: Link) -> OffloadSolution:
        """The schedule with the smallest peak found: with enough room on the host, that of `floor_of` with offloads."""
        self._portfolio.build_on_smallest()
        return self.solve(self._smallest_peak(link), link, "fast")

    def _improve(self, search: OffloadSearch, plain: Solution | None, effort: Effort, limit_seconds: float) -> None:
        """Offer earlier solutions and plans for larger budgets, with offloads, then search around the best.

        `plain` is the portfolio's solution within the budget, or None if it has none."""
        for found_for, plan in self._found:
            if found_for <= search.cap_bytes:
                search.offer_again(plan)
        search.consider("save all", self._save_all)
        seeds = [*self._hull_plans, self._as_candidate(plain or self._portfolio.smallest())]
        if plain is None or self._problem.home_bytes:  # then no seed fits as it is
            for seed in seeds:
                search.consider(f"{seed.method}, offloaded", seed.evaluations)
        larger_bytes = self._raise_budget(search, seeds, None if plain is None else search.cap_bytes)
        if effort == "fast":
            return
        for cut in offload_cuts(self._problem, self._network, self._hull, search.link):
            evaluations = to_array(just_in_time(self._problem, cut.saved))
            search.consider("three-way cut", polish(self._arrays, evaluations, peak_bytes(self._arrays, evaluations)))
        above = self._portfolio.solve(larger_bytes, "default" if self._is_small else "fast")
        search.consider(f"{above.method}, offloaded", to_array(above.schedule))
        if search.best is None:
            return
        search.drop(_EXPLORED)
        search.explore(_EXPLORED)
        started = time.monotonic()
        while effort == "best" and time.monotonic() - started < limit_seconds and not search.done:
            search.explore(_EXPLORED)

    def _raise_budget(self, search: OffloadSearch, seeds: list[Candidate], budget_bytes: int | None) -> int:
        """Offer plans for larger budgets, with offloads; returns the largest budget that passed `_bring_below`.

        Budgets are chosen by bisection. `budget_bytes` is None if there is no plan without offloads: they then start at
        the smallest peak. `seeds` are plans without offloads; the last is that for the budget, or the smallest.
        """
        most = peak_bytes(self._arrays, self._save_all)
        if budget_bytes is None:
            low = self._portfolio.smallest().peak_bytes
            tried = [int(low + share * (most - low)) for share in _DEEP_SHARES]
            last = max((i for i, larger in enumerate(tried) if self._bring_below(search, seeds, larger)), default=0)
            low, high = tried[last], [*tried, most][last + 1]
        else:
            low = budget_bytes
            high = int(min(most, low + search.link.bytes_per_second * self._problem.seconds))
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
            polished.append(self._as_candidate(self._portfolio.solve(larger_bytes, "fast")))
        before = search.best
        least, *others = sorted(polished, key=lambda plan: plan.added_seconds)
        goes_on = search.consider(f"{least.method}, offloaded", least.evaluations)
        for plan in others:
            search.consider(f"{plan.method}, offloaded", plan.evaluations)
        return goes_on or search.best is not before

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

    def _as_candidate(self, solution: Solution) -> Candidate:
        return candidate(self._arrays, solution.method, to_array(solution.schedule))

    def _offer_proposed(self, search: OffloadSearch, name: str, schedule: Schedule) -> None:
        """Offer a user's schedule with offloads if it fits the budget and the host in the simulator."""
        try:
            simulation = simulate(self._problem, schedule, search.link)
        except ValueError:  # more bytes on the host than the link allows
            return
        brought = {offload.storage for offload in schedule.offloads if self._problem.storages[offload.storage].home}
        missing = sum(storage.home for storage in self._problem.storages) > len(brought)
        if simulation.peak_bytes <= search.cap_bytes and math.isfinite(simulation.added_seconds) and not missing:
            offloads = np.array([astuple(offload) for offload in schedule.offloads], np.int64)
            search.offer(OffloadCandidate(name, to_array(schedule), offloads, simulation.added_seconds))

    def _smallest_peak(self, link: Link) -> int:
        """The smallest peak in bytes for which offloads can be placed, found by bisection."""
        high, low = self._portfolio.smallest().peak_bytes, floor_of(self._problem, offloading=True)[0]
        if link.bytes_per_second == 0:
            return high
        seeds = [self._save_all, to_array(self._portfolio.smallest().schedule)]
        placers = [Placer(self._arrays, evaluations) for evaluations in seeds]
        nothing = np.zeros(len(self._problem.storages))

        def fits(cap_bytes: int) -> bool:
            return any(placer.place(cap_bytes, nothing, link.host_bytes) is not None for placer in placers)

        return low + bisect_left(range(low, high), True, key=fits)

    def _judged(self, plan: OffloadCandidate, budget_bytes: int, link: Link, bound: float) -> OffloadSolution:
        """The plan as a solution, simulated; the simulator must confirm that it fits."""
        schedule = Schedule(tuple(plan.evaluations.tolist()), tuple(Offload(*row) for row in plan.offloads.tolist()))
        simulation = simulate(self._problem, schedule, link)
        assert simulation.peak_bytes <= budget_bytes, "the simulated peak exceeds the budget"
        peak, added = simulation.peak_bytes, simulation.added_seconds
        return OffloadSolution(
            schedule, peak, added, bound, plan.method, simulation.stall_seconds, simulation.host_bytes
        )

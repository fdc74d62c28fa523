"""The portfolio with offload as a third choice: the best of keeping, recomputing and moving to the host.

What hides behind compute makes a budget of B bytes as good as one of B + H bytes, where H is what the link has on the
host; so plans of the portfolio for larger budgets are brought below B by offloading. How much larger is found by
bisection. The cuts that weigh all three choices are seeds too, and so is saving everything, which can go down to what
single ops need. The best is searched on from. As a rule what is offloaded hides entirely, as FlashNeuron (Bae et al.,
2021) and POFO (Beaumont et al., 2021) have it; waiting is chosen where it costs less than recomputing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memopt.solver.arrays import Floats, Ints, arrays_of
from memopt.solver.errors import Infeasible
from memopt.solver.hull import lower_hull
from memopt.solver.just_in_time import just_in_time
from memopt.solver.link import Link
from memopt.solver.liveness import peak_bytes, to_array
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.offload_bound import OffloadBound, transient_floor
from memopt.solver.offload_cuts import offload_cuts
from memopt.solver.offload_place import Placer
from memopt.solver.offload_search import OffloadCandidate, OffloadSearch
from memopt.solver.polish import polish
from memopt.solver.portfolio import Effort, Portfolio, Solution
from memopt.solver.problem import RematProblem
from memopt.solver.schedule import Offload, Schedule
from memopt.solver.search import Candidate, candidate
from memopt.solver.simulator import simulate

_BISECTIONS = 7
# Shares of the way from the smallest peak to saving everything, tried where nothing fits without offload.
_DEEP_SHARES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6)
# Evaluations that the placements of a local search may go through: half a second's worth.
_EXPLORED = 400_000
# Up to so many ops the portfolio looks as long for a plan above the budget as for one within it.
_MOST_OPS_TWICE = 4_000
# A plan this close to the lower bound, as a share of the step, is not searched any further.
_CLOSE_ENOUGH = 1e-4


@dataclass(frozen=True)
class OffloadSolution(Solution):
    """A schedule within a budget over a link, judged by the simulator; `added_seconds` counts the waiting too."""

    stall_seconds: float
    """For which compute waits for transfers."""
    host_bytes: int
    """The most that is on the host at a time."""


class OffloadPortfolio:
    """Solves one problem at any number of budgets and links.

    A solution fits its budget and the host's, and adds no more than the portfolio's without offload, and no more than
    any solution found before for a smaller budget. Without bandwidth it is the portfolio's.
    """

    def __init__(self, problem: RematProblem, portfolio: Portfolio | None = None) -> None:
        self._problem = problem
        self._portfolio = portfolio or Portfolio(problem)
        self._arrays = arrays_of(problem)
        self._bound = OffloadBound(problem)
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

        `effort` is as in `Portfolio.solve`; "best" searches for up to `limit_seconds`, half of them with offload.
        `plain` is what the portfolio found for this budget without offload; None: it is asked.

        Raises `Infeasible` where none is found, with the smallest peak that works; `ValueError` for another effort.
        """
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
        if link.bytes_per_second > 0 and (plain is None or not self._is_close(search, bound)):
            self._improve(search, budget_bytes, link, effort, bound, limit_seconds / 2)
        if search.best is None:
            assert refused is not None
            if link.bytes_per_second == 0:
                raise refused
            raise Infeasible(self._smallest_peak(link), *transient_floor(self._problem)) from refused
        self._found.append((budget_bytes, search.best))
        return self._judged(search.best, budget_bytes, link, bound)

    def smallest(self, link: Link) -> OffloadSolution:
        """The schedule of the smallest peak found: with room on the host, what the neediest op alone takes."""
        return self.solve(self._smallest_peak(link), link, "fast")

    def _improve(
        self, search: OffloadSearch, budget_bytes: int, link: Link, effort: Effort, bound: float, limit_seconds: float
    ) -> None:
        """Place offloads into many orders of evaluations, then search around the best."""
        for found_for, plan in self._found:
            if found_for <= budget_bytes:
                search.offer_again(plan)
        search.consider("save all", self._save_all)
        larger_bytes = self._climb(search, budget_bytes, link)
        if effort == "fast":
            return
        for evaluations in self._three_way(link):
            search.consider("three-way cut", polish(self._arrays, evaluations, peak_bytes(self._arrays, evaluations)))
        effort_above: Effort = "default" if len(self._problem.ops) <= _MOST_OPS_TWICE else "fast"
        plan_above = self._portfolio.solve(larger_bytes, effort_above)
        search.consider(f"{plan_above.method}, offloaded", to_array(plan_above.schedule))
        search.drop(_EXPLORED)
        search.explore(_EXPLORED)
        started = time.monotonic()
        while effort == "best" and time.monotonic() - started < limit_seconds and not self._is_close(search, bound):
            search.explore(_EXPLORED)

    def _climb(self, search: OffloadSearch, budget_bytes: int, link: Link) -> int:
        """Bring plans for larger budgets below this one, upwards while that is faster; the last that was."""
        seeds = list(self._hull_plans)
        if search.best is not None and not search.best.offloads.size:
            seeds.append(candidate(self._arrays, search.best.method, search.best.evaluations))
        smallest = self._portfolio.smallest()
        most = peak_bytes(self._arrays, self._save_all)
        low, high = max(budget_bytes, smallest.peak_bytes), most
        if budget_bytes < smallest.peak_bytes:
            seeds.append(candidate(self._arrays, smallest.method, to_array(smallest.schedule)))
            tried = [int(low + share * (most - low)) for share in _DEEP_SHARES]
            last = max((i for i, larger in enumerate(tried) if self._bring_below(search, seeds, larger)), default=0)
            low, high = tried[last], [*tried, most][last + 1]
        elif link.bytes_per_second * self._problem.seconds < most - low:
            high = low + int(link.bytes_per_second * self._problem.seconds)
        for _ in range(_BISECTIONS):
            middle = (low + high) // 2
            if self._bring_below(search, seeds, middle):
                low = middle
            else:
                high = middle
        return low

    def _bring_below(self, search: OffloadSearch, seeds: list[Candidate], larger_bytes: int) -> bool:
        """Offload from the fastest plan known for a larger budget; False where that is slower than the best."""
        fitting = sorted((p for p in seeds if p.peak_bytes <= larger_bytes), key=lambda plan: plan.added_seconds)
        if not fitting:
            return False
        polished = [
            candidate(self._arrays, plan.method, polish(self._arrays, plan.evaluations, larger_bytes))
            for plan in (*fitting[:2], seeds[-1])
            if plan.peak_bytes <= larger_bytes
        ]
        plan = min(polished, key=lambda plan: plan.added_seconds)
        return search.consider(f"{plan.method}, offloaded", plan.evaluations)

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
        """Schedules of the cuts that weigh all three choices."""
        forward = sum(op.seconds for op in self._problem.ops[: self._problem.forward_ops])
        capacity_seconds = min(forward, self._problem.seconds - forward)  # out in the one, back in the other
        cuts = offload_cuts(self._problem, self._network, self._hull, link, capacity_seconds)
        return [to_array(just_in_time(self._problem, cut.saved)) for cut in cuts]

    def _new_search(self, cap_bytes: int, link: Link) -> OffloadSearch:
        return OffloadSearch(self._arrays, cap_bytes, self._transfer_seconds(link), link.host_bytes)

    def _transfer_seconds(self, link: Link) -> Floats:
        return np.array([link.transfer_seconds(storage.bytes) for storage in self._problem.storages], np.float64)

    def _is_close(self, search: OffloadSearch, bound: float) -> bool:
        assert search.best is not None
        return search.best.added_seconds <= bound + _CLOSE_ENOUGH * self._problem.seconds

    def _smallest_peak(self, link: Link) -> int:
        """By bisection where the host has too little room for all that one op does not need."""
        high, low = self._portfolio.smallest().peak_bytes, transient_floor(self._problem)[0]
        if link.bytes_per_second == 0:
            return high
        seeds = [self._save_all, to_array(self._portfolio.smallest().schedule)]
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
    nothing = np.zeros((0, 5), np.int64)
    return OffloadCandidate(solution.method, to_array(solution.schedule), nothing, solution.added_seconds)

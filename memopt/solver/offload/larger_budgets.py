"""Fits plans made for larger budgets into a budget by offloading some of the values that they save.

If H bytes can be on the host and their transfers hide behind compute, a budget of B bytes is as good as one of B + H
bytes. The largest such H is found by bisection. The cuts that save, offload or recompute (`cuts`) are tried too.
"""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np

from memopt.solver.arrays import Arrays, Ints
from memopt.solver.cut_schedules import just_in_time
from memopt.solver.hull import lower_hull
from memopt.solver.liveness import peak_bytes, to_array
from memopt.solver.min_cut import Cut, CutNetwork
from memopt.solver.offload.cuts import offload_cuts
from memopt.solver.offload.search import OffloadSearch
from memopt.solver.polish import polish
from memopt.solver.portfolio import Portfolio, Solution
from memopt.solver.problem import Link, RematProblem
from memopt.solver.schedule import Schedule
from memopt.solver.search import LENGTH_EXPONENTS, Candidate, candidate

_BISECTIONS = 7
# If no plan fits without offloads: budgets to try, as shares of the way from the smallest peak to saving everything.
_DEEP_SHARES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6)
# For problems with at most this many ops the portfolio solves each budget tried, and the last one with more effort.
_SMALL_OPS = 4_000


class LargerBudgets:
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
        self._look_around(search, [*seeds, _as_candidate(self._arrays, above)], budget_bytes, larger_bytes)

    def _seeds(self, search: OffloadSearch, plain: Solution | None) -> list[Candidate]:
        """The plans without offloads to start from: those of the hull and, last, `plain` or the smallest."""
        seeds = [*self._hull_plans, _as_candidate(self._arrays, plain or self._portfolio.smallest())]
        for plan in seeds if plain is None else ():
            search.consider(f"{plan.method}, offloaded", plan.evaluations)
        return seeds

    def _raise_budget(self, search: OffloadSearch, seeds: list[Candidate], budget_bytes: int | None, link: Link) -> int:
        """The largest budget found, by bisection, whose plan with offloads is faster than the best so far.

        `budget_bytes` is None if there is no plan without offloads: budgets then start at the smallest peak.
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
        """Offer the fastest plans known for a larger budget with offloads; False if none can be or is the best."""
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

    def _look_around(self, search: OffloadSearch, seeds: list[Candidate], budget_bytes: int, larger_bytes: int) -> None:
        """Offer polishes of the fastest seeds under caps around the budget at which the bisection ended."""
        exponents = LENGTH_EXPONENTS if self._is_small else (0.5,)
        for share in np.linspace(0.75, 1.15, 9 if self._is_small else 3):
            cap_bytes = int(budget_bytes + share * (larger_bytes - budget_bytes))
            fitting = sorted((p for p in seeds if p.peak_bytes <= cap_bytes), key=lambda plan: plan.added_seconds)
            for plan, exponent in itertools.product(fitting[:3], exponents):
                search.consider(
                    f"{plan.method}, offloaded", polish(self._arrays, plan.evaluations, cap_bytes, exponent)
                )

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

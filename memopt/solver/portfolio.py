"""Runs all solvers and returns the best schedule that any of them finds within a budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import get_args

from memopt.solver.arrays import Ints, arrays_of, to_array, to_schedule
from memopt.solver.chain_plans import NestedChain
from memopt.solver.lower_bound import LowerBound, floor_bytes, floor_of
from memopt.solver.min_cut import CutNetwork, just_in_time, lower_hull
from memopt.solver.native import entries, is_compiled, ready_made, signature
from memopt.solver.problem import RematProblem, Schedule
from memopt.solver.protocol import Baseline, Effort, Infeasible, Solution, Solver, check_solver, proposals, recipes
from memopt.solver.search import (
    NEAREST_POWERS,
    NEXT_POWERS,
    SAVE_ALL_POWERS,
    Candidate,
    Progress,
    Search,
    candidate,
    search_on,
)
from memopt.solver.simulator import simulate

# The search ends when the best plan is this close to the lower bound, as a share of the step's seconds.
CLOSE_ENOUGH = 1e-4
# Nested recomputation is not tried when the best plan is this close to the lower bound.
_NEEDS_NO_NESTING = 1e-3
# The most evaluations that the plans of one local search have together: about half a second. Small problems, whose
# plans take less time to build, may have more.
_EXPLORED, _EXPLORED_SMALL, _SMALL_OPS = 55_000, 120_000, 1_500
# Repairs of the plan that saves everything take longest and do not help large problems: none once repairs have made
# this many evaluations and a plan fits.
_SPENT_BEFORE_SAVE_ALL = 100_000
# The most evaluations that the repairs in search of the smallest peak make: a second or two.
_SPENT_ON_SMALLEST = 150_000


class Portfolio:
    """Solves one problem at any number of budgets; work that does not depend on the budget is done once.

    A solution fits its budget, adds no more seconds than any baseline or schedule of a minimum cut that fits, and no
    more than any solution already found for a smaller budget. Every budget from `smallest().peak_bytes` on is solved.

    `solvers` are a user's own. Each `solve` calls them once, after the built-in solvers, so that no solution adds more
    seconds than without them. Their schedules that do not fit are repaired, and the fastest that fits wins, with the
    solver's name in `Solution.method`. Schedules with offloads are left to `OffloadPortfolio`. If a solver fails,
    `SolverError` is raised."""

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver] = ()) -> None:
        self._problem = problem
        self._arrays = arrays_of(problem)
        self.bound = LowerBound(problem)
        """A lower bound on the seconds that any schedule within a budget adds."""
        self._nested_chain = NestedChain(problem)
        for solver in solvers:
            check_solver(solver)
        self._solvers = tuple(solvers)
        self._proposals: tuple[int, list[tuple[str, Schedule]]] | None = None
        self._explored = _EXPLORED_SMALL if len(problem.ops) < _SMALL_OPS else _EXPLORED
        self._found: list[Candidate] = []
        self._found_with_users: list[Candidate] = []

    def solve(
        self,
        budget_bytes: int,
        effort: Effort = "default",
        *,
        limit_seconds: float = 60.0,
        report: Callable[[Progress], None] | None = None,
    ) -> Solution:
        """The fastest schedule found with a simulated peak of at most `budget_bytes`.

        `effort` is "fast" (a fraction of a second), "default", or "best". The last improves the result of "default" for
        up to `limit_seconds` of wall time and calls `report` several times a second. The others are deterministic.

        Raises `Infeasible` if no schedule is found, with the smallest peak that works, and `ValueError` for another
        effort.
        """
        if effort not in get_args(Effort):
            raise ValueError(f'effort is "fast", "default" or "best", not {effort!r}')
        bound = self.bound.added_seconds(budget_bytes)
        search = Search(self._arrays, budget_bytes, bound + CLOSE_ENOUGH * self._problem.seconds)
        known = [*self._baselines, *self._hull_plans, *self._found]
        for plan in known:
            search.offer(plan)
        if math.isfinite(bound):  # else nothing fits
            if effort == "fast" and not search.done:
                self._improve_a_little(search, known)
            if effort != "fast" or search.best is None:
                self._improve(search, known, bound)
        if search.best is None:
            search.offer(self._own_smallest)
        if self._solvers:
            self._found += [] if search.best is None else [search.best]
            self._add_users_plans(search, quickly=effort == "fast")
        if search.best is None:
            raise Infeasible(self._smallest.peak_bytes, *floor_of(self._problem))
        if effort == "best":
            seeds = [self._baselines[0], *sorted(known, key=lambda plan: abs(plan.peak_bytes - budget_bytes))[:8]]
            search_on(search, seeds, bound, limit_seconds, report)
        (self._found_with_users if self._solvers else self._found).append(search.best)
        return self._judged(search.best, budget_bytes, bound)

    def smallest(self) -> Solution:
        """The schedule with the smallest peak that was found."""
        peak_bytes = self._smallest.peak_bytes
        return self._judged(self._smallest, peak_bytes, self.bound.added_seconds(peak_bytes))

    def build_on_smallest(self) -> None:
        """From now on, start every `solve` from the schedule with the smallest peak as well. (Calling `smallest` alone
        changes no later solution.)"""
        self._found.append(self._own_smallest)

    def known_within(self, budget_bytes: int) -> Iterator[Solution]:
        """The schedules within a budget that have been found so far, for any budget, the fastest first."""
        known = dict.fromkeys([*self._baselines, *self._hull_plans, *self._found, *self._found_with_users])
        bound = self.bound.added_seconds(budget_bytes)
        for plan in sorted(known, key=lambda plan: (plan.added_seconds, plan.peak_bytes)):
            if plan.peak_bytes <= budget_bytes:
                yield self._judged(plan, budget_bytes, bound)

    def baselines(self) -> tuple[Baseline, ...]:
        """The costs of saving everything, which comes first, and of the usual recipes of checkpointing."""
        return tuple(Baseline(plan.method, plan.peak_bytes, plan.added_seconds) for plan in self._baselines)

    @cached_property
    def _baselines(self) -> list[Candidate]:
        return [self._candidate(name, schedule) for name, schedule in recipes(self._problem).items()]

    @cached_property
    def _hull_plans(self) -> list[Candidate]:
        """The just-in-time schedule of each cut of the lower hull."""
        cuts = lower_hull(CutNetwork(self._problem))
        return [self._candidate("minimum cut", just_in_time(self._problem, cut.saved)) for cut in cuts]

    def _candidate(self, method: str, schedule: Schedule) -> Candidate:
        return candidate(self._arrays, method, to_array(schedule))

    def _improve_a_little(self, search: Search, known: list[Candidate]) -> None:
        """Polish the fastest plan that fits, and repair the plan with the smallest peak above the cap."""
        if search.best is not None:
            search.polish(search.best)
        search.repair(self._baselines[0], SAVE_ALL_POWERS[:1])
        for plan in _by_cap(known, search.cap_bytes)[1][:1]:
            search.repair(plan, NEAREST_POWERS[:1])

    def _improve(self, search: Search, known: list[Candidate], bound: float) -> None:
        """Polish the fastest plans that fit, repair those with the smallest peaks above the cap, and search further."""
        cap_bytes = search.cap_bytes
        fitting, above = _by_cap(known, cap_bytes)
        # The fastest are often solutions for other budgets, which a polish leaves unchanged; so cuts are polished too.
        cuts = [plan for plan in fitting if plan in self._hull_plans]
        for plan in dict.fromkeys([*fitting[:3], *cuts[:3]]):
            search.polish(plan)
        for seed, powers in zip(above, (NEAREST_POWERS, NEXT_POWERS, NEXT_POWERS), strict=False):
            search.repair(seed, powers)
        nested: list[Candidate] = []
        if search.best is None or search.best.added_seconds > bound + _NEEDS_NO_NESTING * self._problem.seconds:
            nested = [self._nested_plan(plan) for plan in self._nested_chain.plans(cap_bytes)]
        for plan in nested:
            search.offer(plan)
            search.polish(plan)
            search.repair(plan, NEXT_POWERS[:1])
        save_all = self._baselines[0]
        for rule in SAVE_ALL_POWERS:
            if search.best is None or search.spent < _SPENT_BEFORE_SAVE_ALL:
                search.repair(save_all, (rule,))
        search.explore(save_all, [*above[:3], *fitting[:2], *nested], self._explored)

    def users_schedules(self, budget_bytes: int) -> list[tuple[str, Schedule]]:
        """The schedules that the user's solvers propose at a budget, each with its solver's name, in the order of the
        solvers. Those of the last budget are cached. Raises `SolverError` as `protocol.proposals` does."""
        if self._proposals is None or self._proposals[0] != budget_bytes:
            found = ((one.name, proposals(one, self._problem, budget_bytes)) for one in self._solvers)
            self._proposals = budget_bytes, [(name, plan) for name, plans in found for plan in plans]
        return self._proposals[1]

    def _users_plans(self, budget_bytes: int) -> list[Candidate]:
        """The plans without offloads that a user's solvers propose."""
        return [self._candidate(name, plan) for name, plan in self.users_schedules(budget_bytes) if not plan.offloads]

    def _add_users_plans(self, search: Search, quickly: bool) -> None:
        """Offer the users' plans and earlier solutions found with them, and improve those nearest to the cap."""
        plans = [*self._users_plans(search.cap_bytes), *self._found_with_users]
        for plan in plans:
            search.offer(plan)
        fitting, above = _by_cap(plans, search.cap_bytes)
        for plan in fitting[:3]:
            search.polish(plan)
        for plan in above[: 1 if quickly else 3]:
            search.repair(plan, NEAREST_POWERS[:1] if quickly else NEAREST_POWERS)
        if plans and not quickly:
            search.explore(self._baselines[0], [*above[:3], *fitting[:2]], self._explored)
        if search.best is None and self._smallest.peak_bytes <= search.cap_bytes:
            search.offer(self._smallest)

    def _nested_plan(self, evaluations: Ints) -> Candidate:
        return candidate(self._arrays, "nested chain", evaluations)

    @cached_property
    def _smallest(self) -> Candidate:
        """The plan with the smallest peak, also of those that a user's solvers propose for the floor as budget."""
        proposed = self._users_plans(floor_bytes(self._problem))
        return min([self._own_smallest, *proposed], key=lambda plan: plan.peak_bytes)

    @cached_property
    def _own_smallest(self) -> Candidate:
        """The plan with the smallest peak from the built-in solvers, found by bisection between the floor and the
        smallest peak known. It does not depend on earlier calls of `solve`, so that every process reports the same."""
        low = floor_bytes(self._problem)
        known = [*self._baselines, *self._hull_plans]
        if self._baselines[0].peak_bytes == low:  # saving everything takes no more than the floor
            return self._baselines[0]
        deeper, table = self._nested_chain.deepest(min(plan.peak_bytes for plan in known))
        known += [self._nested_plan(evaluations) for evaluations in deeper]
        seeds = [*sorted(known, key=lambda plan: plan.peak_bytes)[:4], self._baselines[0]]
        best = seeds[0]
        spent = 0
        while best.peak_bytes > low * 1.003 + 1 and spent < _SPENT_ON_SMALLEST:
            cap_bytes = (low + best.peak_bytes) // 2
            search = Search(self._arrays, cap_bytes)
            nested = None if table is None else table.plan(cap_bytes)
            plan = None if nested is None else self._nested_plan(nested)
            if plan is None or plan.peak_bytes > cap_bytes:
                plan = _first_fit(search, seeds)
            spent += search.spent
            if plan is None:
                low = cap_bytes
            else:
                best = plan
                seeds = [best, *seeds[:5]]
        search = Search(self._arrays, best.peak_bytes)
        search.offer(best)
        search.polish(best)
        for seed in seeds[:2]:
            search.repair(seed, NEAREST_POWERS)
        search.explore(self._baselines[0], seeds[:2], self._explored // 4)
        assert search.best is not None
        return search.best

    def _judged(self, plan: Candidate, budget_bytes: int, bound: float) -> Solution:
        """The plan as a solution, simulated; the simulator must confirm that it fits."""
        schedule = to_schedule(plan.evaluations)
        simulation = simulate(self._problem, schedule)
        assert simulation.peak_bytes == plan.peak_bytes <= budget_bytes, "the simulated peak differs or is too high"
        return Solution(schedule, simulation.peak_bytes, simulation.added_seconds, bound, plan.method)


def _by_cap(plans: list[Candidate], cap_bytes: int) -> tuple[list[Candidate], list[Candidate]]:
    """The plans that fit the cap, the fastest first, and those above it, the smallest peak first."""
    fitting = sorted((p for p in plans if p.peak_bytes <= cap_bytes), key=lambda plan: plan.added_seconds)
    return fitting, sorted((p for p in plans if p.peak_bytes > cap_bytes), key=lambda plan: plan.peak_bytes)


def _first_fit(search: Search, seeds: list[Candidate]) -> Candidate | None:
    """The first repair that fits the cap, over all seeds and eviction rules; None if none does or the work runs out."""
    for seed in seeds:
        for rule in (*SAVE_ALL_POWERS, *NEAREST_POWERS):
            plan = search.repaired(seed, rule)
            if plan is not None:
                return plan
            if search.spent >= _SPENT_ON_SMALLEST // 2:
                return None
    return None


@cache
def warm_up() -> None:
    """Compile the solvers' kernels. Does nothing if they were compiled when memopt was installed (the extension of
    `native`).

    Warns if neither that extension nor numba is installed, so that the kernels run as plain Python.

    With numba this takes about 12 seconds the first time on a machine; later processes read the machine code from disk.
    """
    if not is_compiled():
        warnings.warn(
            "the solvers run as plain Python, because their kernels were not compiled when memopt was installed and "
            "numba is missing; plans are the same, but take several times as long to find; "
            "pip install 'memopt[numba]'",
            stacklevel=2,
        )
    elif ready_made() is None:
        for kernel in entries():
            kernel.compile(signature(kernel.py_func))

"""All solvers together: the best schedule that any of them finds within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from memopt.solver.arrays import arrays_of
from memopt.solver.baselines import baseline_solvers
from memopt.solver.best_effort import Progress, search_on
from memopt.solver.chain_plans import NestedChain
from memopt.solver.cut_schedules import MinimumCut
from memopt.solver.errors import Infeasible
from memopt.solver.liveness import to_array, to_schedule
from memopt.solver.lower_bound import LowerBound, floor_of
from memopt.solver.problem import RematProblem
from memopt.solver.protocol import Solver
from memopt.solver.schedule import Schedule
from memopt.solver.search import NEAREST_POWERS, NEXT_POWERS, SAVE_ALL_POWERS, Candidate, Search, candidate
from memopt.solver.simulator import simulate
from memopt.solver.user_solvers import UserSolvers

Effort = Literal["fast", "default", "best"]

# A plan this close to the lower bound, as a share of the step, is not searched any further.
_CLOSE_ENOUGH = 1e-4
# This close, nested recomputation has nothing to offer.
_NEEDS_NO_NESTING = 1e-3
# How many evaluations the plans of a local search may have together, half a second's worth; more
# where plans are short, since building and cutting them takes less.
_EXPLORED, _EXPLORED_SMALL, _SMALL_OPS = 55_000, 120_000, 1_500
# Forward ops up to which the exact reference takes part: a tenth of a second.
_TINY_OPS = 24
# Large problems gain nothing from repairs of the plan that saves all, which take longest: none after so many.
_SPENT_BEFORE_SAVE_ALL = 100_000
# How many the repairs may make that look for the smallest peak: a second or two.
_SPENT_ON_SMALLEST = 150_000


@dataclass(frozen=True)
class Solution:
    """A schedule within a budget, judged by the simulator."""

    schedule: Schedule
    peak_bytes: int
    added_seconds: float
    lower_bound_seconds: float
    """No schedule within the budget adds less."""
    method: str


@dataclass(frozen=True)
class Baseline:
    """What a recipe done by hand costs; it may not fit any given budget."""

    name: str
    peak_bytes: int
    added_seconds: float


class Portfolio:
    """Solves one problem at any number of budgets; what does not depend on the budget is done once.

    A solution fits its budget, adds no more than any baseline or plan of the hull that fits it, and no more than any
    solution already found for a smaller budget. Every budget from `smallest().peak_bytes` on is solved.

    `solvers` are a user's own, asked once in each `solve` after ours are done, so that no solution is slower for them.
    Their schedules are judged as ours are: what does not fit is a start for repair, and the fastest that fits wins,
    with the solver's name in the solution's `method`. Schedules with offloads are left to `OffloadPortfolio`. A solver
    that fails raises `SolverError`.
    """

    def __init__(self, problem: RematProblem, solvers: Sequence[Solver] = ()) -> None:
        self._problem = problem
        self._arrays = arrays_of(problem)
        self._bound = LowerBound(problem)
        self._nested_chain = NestedChain()
        self.users = UserSolvers(problem, solvers)
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

        `effort` is "fast" (a fraction of a second), "default", or "best": what "default" finds, bettered for up to
        `limit_seconds` of wall time, with `report` called several times a second. The first two are deterministic.

        Raises `Infeasible` where none is found, with the smallest peak that works; `ValueError` for another effort.
        """
        if effort not in get_args(Effort):
            raise ValueError(f'effort is "fast", "default" or "best", not {effort!r}')
        bound = self._bound.added_seconds(budget_bytes)
        search = Search(self._arrays, budget_bytes, bound + _CLOSE_ENOUGH * self._problem.seconds)
        known = [*self._baselines, *self._hull_plans, *self._found]
        for plan in known:
            search.offer(plan)
        if effort == "fast" and not search.done:
            self._improve_a_little(search, known)
        if effort != "fast" or search.best is None:
            self._improve(search, known, bound)
        if search.best is None:
            search.offer(self._own_smallest)
        if self.users.solvers:
            self._found += [] if search.best is None else [search.best]
            self._add_users_plans(search, quickly=effort == "fast")
        if search.best is None:
            floor = floor_of(self._problem)
            raise Infeasible(self._smallest.peak_bytes, floor.bytes, floor.op)
        if effort == "best":
            seeds = [self._baselines[0], *sorted(known, key=lambda plan: abs(plan.peak_bytes - budget_bytes))[:8]]
            search_on(self._problem, self._arrays, search, seeds, bound, limit_seconds, report)
        (self._found_with_users if self.users.solvers else self._found).append(search.best)
        return self._judged(search.best, budget_bytes, bound)

    def smallest(self) -> Solution:
        """The schedule of the smallest peak found."""
        peak_bytes = self._smallest.peak_bytes
        return self._judged(self._smallest, peak_bytes, self._bound.added_seconds(peak_bytes))

    def baselines(self) -> tuple[Baseline, ...]:
        """What saving everything and the usual recipes of checkpointing cost."""
        return tuple(Baseline(plan.method, plan.peak_bytes, plan.added_seconds) for plan in self._baselines)

    @cached_property
    def _baselines(self) -> list[Candidate]:
        return [plan for solver in baseline_solvers(self._problem) for plan in self._plans_of(solver)]

    @cached_property
    def _hull_plans(self) -> list[Candidate]:
        return self._plans_of(MinimumCut())

    @property
    def _explored(self) -> int:
        return _EXPLORED_SMALL if len(self._problem.ops) < _SMALL_OPS else _EXPLORED

    def _improve_a_little(self, search: Search, known: list[Candidate]) -> None:
        """Polish the fastest plan that fits, repair the nearest that does not."""
        if search.best is not None:
            search.polish(search.best)
        search.repair(self._baselines[0], SAVE_ALL_POWERS[:1])
        above = [plan for plan in known if plan.peak_bytes > search.cap_bytes]
        if above:
            search.repair(min(above, key=lambda plan: plan.peak_bytes), NEAREST_POWERS[:1])

    def _improve(self, search: Search, known: list[Candidate], bound: float) -> None:
        """Polish the fastest plans that fit, repair the nearest that do not, and search around the best."""
        cap_bytes = search.cap_bytes
        fitting = sorted((p for p in known if p.peak_bytes <= cap_bytes), key=lambda plan: plan.added_seconds)
        above = sorted((p for p in known if p.peak_bytes > cap_bytes), key=lambda plan: plan.peak_bytes)
        # The fastest are often solutions for other budgets, which polish to themselves.
        cuts = [plan for plan in fitting if plan in self._hull_plans]
        for plan in dict.fromkeys([*fitting[:3], *cuts[:3]]):
            search.polish(plan)
        for seed, powers in zip(above, (NEAREST_POWERS, NEXT_POWERS, NEXT_POWERS), strict=False):
            search.repair(seed, powers)
        nested: list[Candidate] = []
        if search.best is None or search.best.added_seconds > bound + _NEEDS_NO_NESTING * self._problem.seconds:
            nested = self._plans_of(self._nested_chain, cap_bytes)
        for plan in nested:
            search.improve(plan, NEXT_POWERS[:1])
        save_all = self._baselines[0]
        for rule in SAVE_ALL_POWERS:
            if search.best is None or search.spent < _SPENT_BEFORE_SAVE_ALL:
                search.repair(save_all, (rule,))
        search.explore(save_all, [*above[:3], *fitting[:2], *nested], self._explored)
        search.offer(None if search.done else self._exact(cap_bytes))

    def _plans_of(self, solver: Solver, budget_bytes: int = 0) -> list[Candidate]:
        """What one of our solvers proposes; the budget does not matter to all of them."""
        schedules = solver.candidates(self._problem, budget_bytes)
        return [candidate(self._arrays, solver.name, to_array(schedule)) for schedule in schedules]

    def _users_plans(self, budget_bytes: int) -> list[Candidate]:
        """What the users' solvers propose without offloads."""
        proposals = self.users.at(budget_bytes)
        return [candidate(self._arrays, name, to_array(plan)) for name, plan in proposals if not plan.offloads]

    def _add_users_plans(self, search: Search, quickly: bool) -> None:
        """Offer what the users' solvers propose and what was found with them before; improve the nearest of it."""
        plans = [*self._users_plans(search.cap_bytes), *self._found_with_users]
        for plan in plans:
            search.offer(plan)
        fitting = sorted((p for p in plans if p.peak_bytes <= search.cap_bytes), key=lambda plan: plan.added_seconds)
        above = sorted((p for p in plans if p.peak_bytes > search.cap_bytes), key=lambda plan: plan.peak_bytes)
        for plan in fitting[:3]:
            search.polish(plan)
        for plan in above[: 1 if quickly else 3]:
            search.repair(plan, NEAREST_POWERS[:1] if quickly else NEAREST_POWERS)
        if plans and not quickly:
            search.explore(self._baselines[0], [*above[:3], *fitting[:2]], self._explored)
        if search.best is None and self._smallest.peak_bytes <= search.cap_bytes:
            search.offer(self._smallest)

    def _exact(self, cap_bytes: int) -> Candidate | None:
        """What the exact reference finds for a tiny problem; None for others, and where it finds nothing."""
        if self._problem.forward_ops > _TINY_OPS:
            return None
        from memopt.solver.exact import Exact  # scipy.optimize takes a while to import

        return next(iter(self._plans_of(Exact(most_forward_ops=_TINY_OPS), cap_bytes)), None)

    def _deepest_nested(self, known: list[Candidate]) -> Callable[[int], list[Candidate]]:
        """Add to `known` the nested plan of the smallest peak, if it is smaller; a function from caps to nested plans.

        The fewer slots of memory, the more blocks a table can have: each table's smallest peak is the cap of the next.
        """

        def plans(cap_bytes: int) -> list[Candidate]:
            plan = None if table is None else table.plan(cap_bytes)
            return [] if plan is None else [candidate(self._arrays, self._nested_chain.name, plan)]

        least = min(plan.peak_bytes for plan in known)
        while True:
            table = self._nested_chain.table(self._problem, least)
            if table is None or table.smallest_cap_bytes is None:
                break
            deepest = plans(table.smallest_cap_bytes)[0]
            if deepest.peak_bytes >= least:
                break
            known.append(deepest)
            least = deepest.peak_bytes
        return plans

    @cached_property
    def _smallest(self) -> Candidate:
        """The schedule of the smallest peak, ours or what the users' solvers propose for the floor."""
        proposed = self._users_plans(floor_of(self._problem).bytes)
        return min([self._own_smallest, *proposed], key=lambda plan: plan.peak_bytes)

    @cached_property
    def _own_smallest(self) -> Candidate:
        """Repair under caps between the floor and the smallest peak known, by bisection. The same whatever was solved
        before: a refusal names its figure to another process."""
        low = floor_of(self._problem).bytes
        known = [*self._baselines, *self._hull_plans]
        nested = self._deepest_nested(known)
        seeds = [*sorted(known, key=lambda plan: plan.peak_bytes)[:4], self._baselines[0]]
        best = seeds[0]
        spent = 0
        while best.peak_bytes > low * 1.003 + 1 and spent < _SPENT_ON_SMALLEST:
            cap_bytes = (low + best.peak_bytes) // 2
            search = Search(self._arrays, cap_bytes)
            plan = next((plan for plan in nested(cap_bytes) if plan.peak_bytes <= cap_bytes), None)
            plan = plan or _first_fit(search, seeds) or self._exact(cap_bytes)
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
        self._found.append(search.best)
        return search.best

    def _judged(self, plan: Candidate, budget_bytes: int, bound: float) -> Solution:
        schedule = to_schedule(plan.evaluations)
        simulation = simulate(self._problem, schedule)
        assert simulation.peak_bytes == plan.peak_bytes <= budget_bytes, "the solvers and the simulator disagree"
        return Solution(schedule, simulation.peak_bytes, simulation.added_seconds, bound, plan.method)


def _first_fit(search: Search, seeds: list[Candidate]) -> Candidate | None:
    """The first repair of any seed by any rule that fits."""
    for seed in seeds:
        for rule in (*SAVE_ALL_POWERS, *NEAREST_POWERS):
            plan = search.repaired(seed, rule)
            if plan is not None:
                return plan
            if search.spent >= _SPENT_ON_SMALLEST // 2:
                return None
    return None

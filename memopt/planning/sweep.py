"""Solves one step for many budgets, the smallest first, and takes the fastest schedule that fits each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

from memopt.account.account import Account
from memopt.errors import GIB
from memopt.planning.frontier import Frontier, FrontierPoint
from memopt.planning.joined import Joined
from memopt.planning.on_card import on_card
from memopt.planning.options import Effort
from memopt.planning.plan import Plan
from memopt.planning.planner import Request, recipes, smallest, solve_settled, step_peak_bytes
from memopt.progress import stage
from memopt.solver import Schedule, Solution, floor_bytes, simulate, warm_up

# The second budget lies this fraction of the way from the smallest budget to the plain peak.
_NEAREST = 1e-3


def sweep(plan: Plan, joined: Joined, points: int, effort: Effort) -> Frontier[Plan]:
    """The frontier of a plan's step, solved for `points` budgets and for the peaks of the recipes.

    The seconds of effort "best" are shared evenly among all budgets. On a card, every point counts the allocator's
    rounding and fragmentation as they are at the smallest budget.
    """
    problem = joined.problem
    with stage("loading the solver"):
        warm_up()
    with stage("looking for the smallest budget"):
        least, dominated_by = smallest(joined, plan.account)
        account = on_card(joined, joined.smallest.schedule, plan.account)
    plain = step_peak_bytes(joined, account, simulate(problem, Schedule.save_all(problem)).peak_bytes)
    by_hand = recipes(joined, account)
    budgets = {*budgets_between(least, plain, points), *(round(recipe.peak_gb * GIB) for recipe in by_hand)}
    return Frontier(
        model=plan.model,
        hardware=plan.hardware,
        step_seconds=problem.seconds,
        plain_gb=plain / GIB,
        smallest_gb=least / GIB,
        floor_gb=step_peak_bytes(joined, account, floor_bytes(problem)) / GIB,
        dominated_by=dominated_by,
        points=_curve(joined, account, sorted(budget for budget in budgets if least <= budget <= plain), effort),
        recipes=by_hand,
        notes=plan.notes,
        effort=effort,
        source=plan,
    )


def budgets_between(smallest_bytes: int, plain_bytes: int, points: int) -> list[int]:
    """`points` budgets in bytes from the smallest to the plain peak, ascending: half of them evenly spaced, half in a
    geometric series towards the smallest, where the curve bends. Equal budgets are listed once."""
    dense = (points - 1) // 2
    even = points - dense
    shares = [number / (even - 1) for number in range(even)]
    shares += [_NEAREST ** (1 - number / dense) for number in range(dense)]
    return sorted({smallest_bytes + round(share * (plain_bytes - smallest_bytes)) for share in shares})


def _curve(joined: Joined, account: Account, budgets: list[int], effort: Effort) -> tuple[FrontierPoint, ...]:
    """For each budget the fastest schedule found for any budget that fits this one, and the tightest lower bound."""
    solutions = _solutions(joined, account, budgets, effort)
    peaks = [step_peak_bytes(joined, account, solution.peak_bytes) for solution in solutions]
    # A bound for a larger budget holds for a smaller one too.
    bounds = list(accumulate((solution.lower_bound_seconds for solution in reversed(solutions)), max))[::-1]
    seconds = joined.problem.seconds or 1.0
    points = []
    for budget, bound in zip(budgets, bounds, strict=True):
        fitting = [(found, peak) for found, peak in zip(solutions, peaks, strict=True) if peak <= budget]
        solution, peak = min(fitting, key=lambda pair: (pair[0].added_seconds, pair[1]))
        most = max(Counter(solution.schedule.evaluations).values())
        added = solution.added_seconds / seconds
        points.append(FrontierPoint(budget / GIB, peak / GIB, added, bound / seconds, solution.method, most))
    return tuple(points)


def _solutions(joined: Joined, account: Account, budgets: list[int], effort: Effort) -> list[Solution]:
    """A solution for each budget, solved in ascending order: none is slower than that for a smaller budget."""
    solutions: list[Solution] = []
    share = replace(effort, limit_seconds=effort.limit_seconds / len(budgets))
    with stage(f"solving for {len(budgets)} budgets") as tell:

        def progress(line: str = "") -> None:
            tell(f"{len(solutions)} done" + (f"; {line}" if line else ""))

        for budget in budgets:
            progress()
            solutions.append(solve_settled(joined, Request(account, budget, share, progress))[1])
    return solutions

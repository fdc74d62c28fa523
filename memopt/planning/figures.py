"""Makes plans and frontiers from solutions of a step's problem, with the numbers that follow from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from memopt.account.account import Account, Breakdown, breakdown
from memopt.errors import GIB
from memopt.levers.all import EXPANDABLE_SEGMENTS, OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS, RECOMPUTE, REINPLACE
from memopt.levers.precision import LEFT_TO_AUTOCAST, PRECISION
from memopt.planning.cluster_step import cluster_step
from memopt.planning.frontier import Frontier, FrontierPoint
from memopt.planning.joined import Joined, on_card
from memopt.planning.options import Effort
from memopt.planning.plan import CAPTURE, PLAIN_STEP, Plan, PlanSource, ReceiptRow
from memopt.planning.planner import Request, least_on_card, recipes, smallest, solve_with_steps, step_peak_bytes
from memopt.planning.priced_step import PricedStep
from memopt.planning.schedule_parts import RegionSchedule, decision_rows, held_after_forward, module_rows
from memopt.price.price import host_seconds
from memopt.progress import stage
from memopt.solver import OffloadSolution, Schedule, Solution, floor_bytes, simulate, warm_up


def plain_step(joined: Joined, account: Account) -> Breakdown:
    """The memory, row by row, at the peak of a step with nothing recomputed."""
    save_all = Schedule.save_all(joined.problem)
    return breakdown(joined.problem, save_all, on_card(joined, save_all, account))


def plain_beside(step: PricedStep, schedule: Schedule, account: Account) -> Breakdown:
    """The memory at the peak of a step with nothing recomputed, to be shown beside a plan's figures. It is that of
    `plain_step`, with the least allocator overhead with which the step completes. But if the plan's `schedule`
    recomputes nothing either, the overhead is that of the plan's own `account`, so that both peaks are equal."""
    save_all = Schedule.save_all(step.plain.problem)
    same = step.plain is step.seen and schedule == save_all
    return breakdown(step.plain.problem, save_all, account) if same else plain_step(step.plain, account)


def plain_row(lever: str, joined: Joined, account: Account) -> ReceiptRow:
    """The receipt's row of `lever`: the peak and the seconds of the step as it has rewritten it."""
    return ReceiptRow(lever, plain_step(joined, account).peak_bytes, joined.problem.seconds)


def beside_plain(plan: Plan, count: Callable[[], ReceiptRow | None], *, low: bool) -> Plan:
    """The plan with the row of the plain step, which `count` returns, put first in its receipt. The plan is returned
    unchanged where its receipt is empty or has that row, or where `count` returns None. `low`: the plan computes in 16
    bits; the row after the plain step's is then named "precision", unless `torch.autocast` decides the dtypes."""
    if not plan.receipt or plan.receipt[0].lever == PLAIN_STEP or (plain := count()) is None:
        return plan
    captured, *rows = plan.receipt
    low = low and LEFT_TO_AUTOCAST not in plan.notes
    first = replace(plain, peak_bytes=plain.peak_bytes + plan.account.elsewhere)
    return replace(plan, receipt=(first, replace(captured, lever=PRECISION.name if low else CAPTURE), *rows))


_OF_SCHEDULES = tuple(
    lever.name for lever in (REINPLACE, EXPANDABLE_SEGMENTS, RECOMPUTE, OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS)
)
"""The levers that a plan's schedule uses, in the order of their rows in the receipt."""


def schedule_levers(plan: Plan) -> tuple[str, ...]:
    """The names of the levers that a plan's schedule uses, without recomputation."""
    used = writes_over(plan), plan.account.expands, False, plan.moved_bytes, plan.hosted_bytes
    return tuple(name for name, is_used in zip(_OF_SCHEDULES, used, strict=True) if is_used)


def _schedule_rows(plan: Plan) -> tuple[ReceiptRow, ...]:
    """The receipt's rows of the levers that a plan's schedule uses."""
    step, schedule = plan.solved
    rows = []
    if writes_over(plan):
        ordinary = replace(plan.account, expandable=plan.account.expandable and not plan.account.expands)
        rows.append(plain_row(REINPLACE.name, step.seen, ordinary))
    if plan.account.expands:
        rows.append(plain_row(EXPANDABLE_SEGMENTS.name, step.seen, plan.account))
    seconds = plan.step_seconds + plan.added_seconds
    if plan.added_seconds > plan.stall_seconds:
        recomputed = breakdown(step.seen.problem, replace(schedule, offloads=()), plan.account)
        rows.append(ReceiptRow(RECOMPUTE.name, recomputed.peak_bytes, seconds - plan.stall_seconds))
    if plan.moved_bytes:
        there = [offload for offload in schedule.offloads if not step.seen.problem.storages[offload.storage].home]
        moved = breakdown(step.seen.problem, replace(schedule, offloads=tuple(there)), plan.account)
        rows.append(ReceiptRow(OFFLOAD_ACTIVATIONS.name, moved.peak_bytes, seconds))
    if plan.hosted_bytes:
        rows.append(ReceiptRow(OFFLOAD_PARAMETERS.name, plan.predicted_peak_bytes, seconds))
    return tuple(rows)


def with_rows_of(other: Plan, plan: Plan) -> Plan:
    """`plan` with the levers and the receipt of `other`, for another budget, but for what schedules decide."""
    before = tuple(row for row in other.receipt if row.lever not in _OF_SCHEDULES)
    levers = (*(name for name in other.levers if name not in _OF_SCHEDULES), *schedule_levers(plan))
    rows = rows_to(plan, before) if before else ()
    return replace(plan, levers=levers, proposals=other.proposals, receipt=rows)


def rows_to(plan: Plan, before: Sequence[ReceiptRow]) -> tuple[ReceiptRow, ...]:
    """The rows of a plan's receipt: `before`, then those that follow from the schedule, up to the plan's peak."""
    *rows, last = (*before, *_schedule_rows(plan))
    return (*rows, replace(last, peak_bytes=plan.predicted_peak_bytes))


def writes_over(plan: Plan) -> bool:
    """Whether operators of the plan's backward overwrite operands that are not read again."""
    return any(region.reuses for region in plan.solved[0].traced.regions)


def plan_by(
    solution: Solution,
    joined: Joined,
    step: PricedStep,
    regions: Sequence[RegionSchedule],
    account: Account,
    budget_bytes: int,
    effort: Effort,
    source: PlanSource,
) -> Plan:
    """The plan of a step, with all its figures, from `solution`, which solves `joined`; `regions` has its schedule."""
    traced = step.traced
    gradients = sum(len(region.inputs_with_gradients) for region in traced.regions)
    return Plan(
        model=traced.model_name,
        hardware=step.settings.hardware.name,
        budget_bytes=budget_bytes,
        account=account,
        plain=plain_beside(step, solution.schedule, account),
        planned=breakdown(step.seen.problem, solution.schedule, account),
        ceiling_bytes=breakdown(joined.problem, solution.schedule, account).peak_bytes,
        step_seconds=joined.problem.seconds,
        added_seconds=solution.added_seconds,
        held_bytes=held_after_forward(joined.problem, solution.schedule),
        bound_seconds=solution.lower_bound_seconds,
        method=solution.method,
        regions=tuple(regions),
        modules=module_rows(joined, solution.schedule),
        host_seconds=0.0 if account.caching else host_seconds(len(traced.regions), gradients),
        notes=traced.all_notes + (account.optimizer_guess,) * bool(account.optimizer_guess),
        effort=effort,
        **_offloading(joined, solution),
        source=source,
        schedule=solution.schedule,
        cluster=None if traced.sharded is None else cluster_step(joined, solution.schedule, step, account),
        kept=traced.kept,
        decisions=decision_rows(joined, step, solution.schedule),
    )


def recounted(plan: Plan, account: Account, **changes: Any) -> Plan:
    """A plan, which must have its graphs, with another account and the peaks that follow from it."""
    step, schedule = plan.solved
    return replace(
        plan,
        account=account,
        planned=breakdown(step.seen.problem, schedule, account),
        ceiling_bytes=breakdown(step.problem.problem, schedule, account).peak_bytes,
        **changes,
    )


def _offloading(joined: Joined, solution: Solution) -> dict[str, Any]:
    """The plan's fields about the host; none for a schedule that offloads nothing."""
    if not isinstance(solution, OffloadSolution):
        return {}
    room = None if joined.link is None else joined.link.host_bytes
    moved = [joined.problem.storages[offload.storage] for offload in solution.schedule.offloads]
    return {
        "host_bytes": solution.host_bytes,
        "moved_bytes": sum(storage.bytes for storage in moved if not storage.home),
        "hosted_bytes": joined.problem.home_bytes,
        "host_room_bytes": None if room is None else int(room),
        "brought_bytes": sum(storage.bytes for storage in moved if storage.home),
        "stall_seconds": solution.stall_seconds,
    }


# The second budget lies this fraction of the way from the smallest budget to the plain peak.
_NEAREST = 1e-3


def sweep(plan: Plan, joined: Joined, points: int, effort: Effort) -> Frontier[Plan]:
    """The frontier of a plan's step, solved for `points` budgets and for the peaks of the recipes, such as a checkpoint
    at every block.

    The seconds of effort "best" are shared evenly among all budgets. On a card, every point counts the allocator's
    rounding and fragmentation as they are at the smallest budget."""
    problem = joined.problem
    with stage("loading the solver"):
        warm_up()
    with stage("looking for the smallest budget"):
        least, dominated_by = smallest(joined, plan.account)
        account = least_on_card(joined, joined.smallest.schedule, plan.account)
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
    """`points` budgets from the smallest to the plain peak: half evenly, half geometrically towards the smallest."""
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
            solutions.append(solve_with_steps(joined, Request(account, budget, share, progress))[1])
    return solutions

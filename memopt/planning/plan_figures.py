"""The plan that follows from a solution of a step's problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memopt.account.account import Account
from memopt.account.breakdown import breakdown
from memopt.planning.cluster_step import cluster_step
from memopt.planning.joined import Joined
from memopt.planning.module_rows import held_after_forward, module_rows
from memopt.planning.options import Effort
from memopt.planning.plan import Plan, PlanSource
from memopt.planning.priced_step import PricedStep
from memopt.planning.receipt import plain_step
from memopt.planning.region_schedule import RegionSchedule
from memopt.price.host_time import host_seconds
from memopt.solver import OffloadSolution, Solution


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
    """The plan of a step by a solution of its problem `joined`, which is split among its `regions`, with all figures
    that follow from it."""
    traced = step.traced
    gradients = sum(region.gradients for region in traced.regions)
    return Plan(
        model=traced.model_name,
        hardware=step.terms.hardware.name,
        budget_bytes=budget_bytes,
        account=account,
        plain=plain_step(step.plain, account),
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
        cluster=cluster_step(joined, solution.schedule, step, account),
        kept=traced.kept,
    )


def _offloading(joined: Joined, solution: Solution) -> dict[str, Any]:
    """The plan's fields about the host; none for a schedule that offloads nothing."""
    if not isinstance(solution, OffloadSolution):
        return {}
    storages = joined.problem.storages
    return {
        "host_bytes": solution.host_bytes,
        "moved_bytes": sum(storages[offload.storage].bytes for offload in solution.schedule.offloads),
        "stall_seconds": solution.stall_seconds,
    }

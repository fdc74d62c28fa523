"""Makes plans: solves a captured step for a budget, and answers what a plan is asked later about its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memopt.account.account import Account
from memopt.account.breakdown import breakdown
from memopt.errors import BudgetError
from memopt.levers.recompute import RECOMPUTE_LEFT_OUT
from memopt.planning.captured import Captured
from memopt.planning.cluster_step import cluster_step
from memopt.planning.frontier import Frontier, Recipe
from memopt.planning.joined import Joined
from memopt.planning.kept_blocks import with_kept_blocks
from memopt.planning.module_rows import held_after_forward, module_rows
from memopt.planning.options import DEFAULT_EFFORT, Effort
from memopt.planning.plan import Plan
from memopt.planning.planner import Request, recipes, smallest, solve_on_card, split
from memopt.planning.receipt import plain_step
from memopt.planning.sweep import sweep
from memopt.price.host_time import host_seconds
from memopt.progress import stage
from memopt.solver import OffloadSolution, Solution, warm_up


def make_plan(
    captured: Captured,
    account: Account,
    budget_bytes: int,
    effort: Effort = DEFAULT_EFFORT,
    *,
    offload: bool = True,
) -> Plan:
    """The plan with the least added time whose simulated peak is within the budget. Raises `BudgetError`.

    With `offload`, activations may go to the host where there is a link to it and that is faster than recomputation.
    """
    with stage("loading the solver"):
        warm_up()

    def solve(account: Account) -> Plan:
        joined = captured.joined(accumulating=account.gradients_held, meanwhile=account.meanwhile)
        with stage("solving") as tell:
            request = Request(account, budget_bytes, effort, tell, offload)
            joined, solution, account = solve_on_card(joined, request)
        return plan_by(solution, joined, captured, account, budget_bytes, effort)

    return with_kept_blocks(solve(account), solve)


def plan_by(
    solution: Solution,
    joined: Joined,
    captured: Captured,
    account: Account,
    budget_bytes: int,
    effort: Effort = DEFAULT_EFFORT,
) -> Plan:
    """The plan of a captured step by a solution of its problem `joined`, with all figures that follow from it."""
    regions = split(joined, captured, solution.schedule)
    captured = captured.stepping_as([region.steps for region in regions])
    seen = captured.joined(accumulating=account.gradients_held, meanwhile=account.meanwhile, as_seen=True)
    return Plan(
        model=captured.model_name,
        hardware=captured.hardware.name,
        budget_bytes=budget_bytes,
        account=account,
        plain=plain_step(captured, account),
        planned=breakdown(seen.problem, solution.schedule, account),
        ceiling_bytes=breakdown(joined.problem, solution.schedule, account).peak_bytes,
        step_seconds=joined.problem.seconds,
        added_seconds=solution.added_seconds,
        held_bytes=held_after_forward(joined.problem, solution.schedule),
        bound_seconds=solution.lower_bound_seconds,
        method=solution.method,
        regions=regions,
        modules=module_rows(joined, solution.schedule),
        host_seconds=0.0 if account.caching else _host_seconds(captured),
        notes=captured.all_notes + (account.optimizer_guess,) * bool(account.optimizer_guess),
        effort=effort,
        **_offloading(joined, solution),
        source=CapturedStep(lambda: captured),
        schedule=solution.schedule,
        cluster=cluster_step(joined, solution.schedule, captured, account),
        kept=captured.kept,
    )


def _host_seconds(captured: Captured) -> float:
    return host_seconds(len(captured.regions), sum(region.gradients for region in captured.regions))


def with_graphs(plan: Plan, capture: Callable[[], Captured]) -> Plan:
    """A plan that was loaded, with the graphs that it is for; `capture` is called when they are first asked for."""
    return replace(plan, source=CapturedStep(capture))


@dataclass(frozen=True)
class CapturedStep:
    """The captured step that a plan is for: the `PlanSource` of every plan that has its graphs."""

    capture: Callable[[], Captured]

    @property
    def captured(self) -> Captured:
        return self.capture()

    def at(self, plan: Plan, budget_bytes: int, effort: Effort) -> Plan:
        captured = self.captured
        try:
            return make_plan(captured, _freed(plan), budget_bytes, effort)
        except BudgetError as error:
            notes = [note for note in captured.all_notes if note.startswith(RECOMPUTE_LEFT_OUT)]
            if not notes:
                raise
            raise BudgetError(error.budget_bytes, error.smallest_bytes, error.dominated_by, further=notes) from None

    def frontier(self, plan: Plan, points: int, effort: Effort) -> Frontier[Plan]:
        return sweep(replace(plan, account=_freed(plan)), self._joined(plan), points, effort)

    def recipes(self, plan: Plan) -> tuple[Recipe, ...]:
        return recipes(self._joined(plan), _freed(plan))

    def smallest_bytes(self, plan: Plan) -> int:
        return smallest(self._joined(plan), _freed(plan))[0]

    def _joined(self, plan: Plan) -> Joined:
        return self.captured.joined(accumulating=plan.account.gradients_held, meanwhile=plan.account.meanwhile)


def _freed(plan: Plan) -> Account:
    """The account of a plan with all blocks freed after their forward."""
    return replace(plan.account, kept=0)


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

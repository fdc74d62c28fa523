"""What a plan changes in its captured step, and the changes that only one of two plans makes: see `Plan.diff`."""

from __future__ import annotations

from collections.abc import Callable

from memopt.planning.changes import KEPT, Change, GraphFacts, between, pass_changes, schedule_changes
from memopt.planning.plan import Plan
from memopt.planning.plan_graphs import PlanDiff, StageDiff
from memopt.planning.priced_step import PricedStep
from memopt.units import size
from passes import diff_graphs


def plan_diff(plan: Plan, step: PricedStep, *, order: bool) -> PlanDiff:
    """What a plan changes in the captured `step` (`Plan.diff`); with `order`, also operators that only moved."""
    changes = [*pass_changes(step.traced), *schedule_changes(step.traced, step.problem, plan.regions, order=order)]
    for path, nbytes in plan.kept:
        reason = "so that the backward need not gather them again"
        changes.append(Change(KEPT, "parameters", path, "parameters", nbytes=nbytes, reason=reason))
    regions = step.traced.regions
    graphs = [one.operators.stages[0] for one in regions if one.operators and one.operators.stages]
    graphs += [region.module for region in regions]
    # in the order of the forward as its author wrote it
    modules = dict.fromkeys(path for module in graphs for path in GraphFacts(module.graph, 0).modules)
    return diff_of(plan, tuple(changes), tuple(modules), lambda stage: plan.diff(stage, order=order))


def diff_of(
    plan: Plan, changes: tuple[Change, ...], modules: tuple[str, ...], of_stage: Callable[[str], StageDiff]
) -> PlanDiff:
    """The diff that shows a plan's `changes`; `modules` and `of_stage` are fields of `PlanDiff`."""
    return PlanDiff(f"{plan.model} on {plan.hardware} within {_budget(plan)}", changes, modules, of_stage)


def diff_between(
    plan: Plan, own: PlanDiff, other: Plan, others: PlanDiff, of_stage: Callable[[str], StageDiff]
) -> PlanDiff:
    """The changes that only one of two plans makes; `own` and `others` have all that each makes."""
    title = (
        f"{plan.model} on {plan.hardware}: + is done only by the plan within {_budget(plan)}, "
        f"- only by the plan within {_budget(other)}"
    )
    modules = dict.fromkeys((*own.modules, *others.modules))
    return PlanDiff(title, between(others.changes, own.changes), tuple(modules), of_stage)


def plans_diff(plan: Plan, step: PricedStep, other: Plan, others: PricedStep, *, order: bool) -> PlanDiff:
    """The changes that only one of two plans makes (`Plan.diff`); `step` and `others` are their steps."""

    def of_stage(stage: str) -> StageDiff:
        graphs = [one.graphs for one in (other, plan)]
        if not all(stage in known for known in graphs):
            both = [repr(name) for name in graphs[0] if all(name in known for known in graphs)]
            raise ValueError(f"no stage {stage!r} in both plans; give one of {', '.join(both)}")
        before, after = (known[stage] for known in graphs)
        if len(before) != len(after):
            raise ValueError(
                f"the plans are of {len(before)} and {len(after)} regions, which cannot be compared line by line; "
                "print plan.diff(other) instead"
            )
        return StageDiff(tuple(diff_graphs(old, new, order=order) for old, new in zip(before, after, strict=True)))

    own, before = plan_diff(plan, step, order=order), plan_diff(other, others, order=order)
    return diff_between(plan, own, other, before, of_stage)


def _budget(plan: Plan) -> str:
    return size(plan.budget_bytes)

"""The effect of each lever on a step in bytes and seconds: one row for each lever."""

from __future__ import annotations

from dataclasses import replace

from memopt.account.account import Account
from memopt.account.breakdown import Breakdown, breakdown
from memopt.levers.offload_activations import OFFLOAD_ACTIVATIONS
from memopt.levers.recompute import RECOMPUTE
from memopt.levers.reinplace import REINPLACE
from memopt.planning.joined import Joined
from memopt.planning.on_card import on_card
from memopt.planning.plan import Plan, ReceiptRow
from memopt.solver import Schedule


def plain_step(joined: Joined, account: Account) -> Breakdown:
    """The tensors that fill the memory at the peak of a step with nothing recomputed."""
    save_all = Schedule.save_all(joined.problem)
    return breakdown(joined.problem, save_all, on_card(joined, save_all, account))


def plain_row(lever: str, joined: Joined, account: Account) -> ReceiptRow:
    """The row of a lever that changed the step: its peak and its seconds with nothing recomputed."""
    return ReceiptRow(lever, plain_step(joined, account).peak_bytes, joined.problem.seconds)


def schedule_rows(plan: Plan) -> tuple[ReceiptRow, ...]:
    """The rows of the levers that a plan's schedule uses, in this order: reinplace, recompute, offload_activations."""
    step = plan.priced
    assert step is not None
    assert plan.schedule is not None
    rows = []
    if writes_over(plan):
        rows.append(plain_row(REINPLACE.name, step.seen, plan.account))
    seconds = plan.step_seconds + plan.added_seconds
    if plan.added_seconds > plan.stall_seconds:
        recomputed = breakdown(step.seen.problem, replace(plan.schedule, offloads=()), plan.account)
        rows.append(ReceiptRow(RECOMPUTE.name, recomputed.peak_bytes, seconds - plan.stall_seconds))
    if plan.moved_bytes:
        rows.append(ReceiptRow(OFFLOAD_ACTIVATIONS.name, plan.predicted_peak_bytes, seconds))
    return tuple(rows)


def writes_over(plan: Plan) -> bool:
    """Whether results of the plan's backward are written over dead operands."""
    assert plan.captured is not None
    return any(region.reuses for region in plan.captured.regions)

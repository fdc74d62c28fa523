"""Judges a plan from disk, or of another rank, by the graphs of the step that it is to run.

Nothing that the plan claims about itself is taken for granted: its schedule is simulated, and everything that the step
runs by or is refused by is computed again.
"""

from __future__ import annotations

from dataclasses import replace

from memopt.account.account import Account
from memopt.account.breakdown import breakdown
from memopt.planning.footprint import Footprint
from memopt.planning.module_rows import held_after_forward
from memopt.planning.on_card import within
from memopt.planning.plan import Plan
from memopt.planning.refit import as_compiled
from memopt.planning.region_schedule import split
from memopt.planning.settle import settle
from memopt.solver import simulate


def is_sound(plan: Plan, footprint: Footprint | None, own: Account, to_come: int) -> bool:
    """Whether a plan with graphs has a valid schedule, figures that follow from it, and a peak within its budget.

    Args:
        footprint: the bytes that the compiled graphs hold; None where they are not compiled.
        own: the account of the step, without the allocator's overhead and what forwards to come hold.
        to_come: the number of further forwards that hold as much as this one until the backward.
    """
    step, schedule = plan.priced, plan.schedule
    assert step is not None
    assert schedule is not None
    joined = step.problem
    try:
        simulate(joined.problem, schedule, joined.link)
    except ValueError:  # no schedule of this problem
        return False
    if settle(joined, schedule) != (schedule, frozenset()) or split(joined, step.traced, schedule) != plan.regions:
        return False
    counted = _counted(plan, footprint)
    if counted != plan:
        return False
    lowering = own.lowering if footprint is None else counted.account.lowering
    waiting = own.other_forwards + to_come * plan.held_bytes
    bare = replace(own, lowering=lowering, other_forwards=waiting)
    if footprint is None:
        account = within(joined, schedule, bare, plan.budget_bytes)
    else:
        account = as_compiled(replace(plan, account=bare), footprint).account
    if account is None:
        return False
    found = plan.account
    same = replace(
        account,
        elsewhere=found.elsewhere,
        other_forwards=found.other_forwards,
        rounding=found.rounding,
        fragmentation=found.fragmentation,
        card_state=found.card_state,
    )
    return found == same and breakdown(joined.problem, schedule, account).peak_bytes <= plan.budget_bytes


def _counted(plan: Plan, footprint: Footprint | None) -> Plan:
    """The plan with the figures that follow from its schedule, its account and its compiled graphs."""
    if footprint is not None:
        return as_compiled(plan, footprint)
    step, schedule = plan.priced, plan.schedule
    assert step is not None
    assert schedule is not None
    return replace(
        plan,
        planned=breakdown(step.seen.problem, schedule, plan.account),
        ceiling_bytes=breakdown(step.problem.problem, schedule, plan.account).peak_bytes,
        held_bytes=held_after_forward(step.problem.problem, schedule),
    )

"""What a step holds beside what lasts between steps, at least and with nothing recomputed; and plans that leave bytes
free for the steps of other models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from memopt.account.account import Account
from memopt.account.breakdown import breakdown
from memopt.errors import BudgetError
from memopt.planning.figures import plain_step, recounted
from memopt.planning.plan import Plan
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.schedule_parts import held_after_forward
from memopt.planning.stages import Priced, StepOfPlan
from memopt.solver import Schedule

_SLACK = 0, 16, 8, 4, 2
"""The plan that holds least may have a peak that is larger by one of these parts, the first that is possible."""


@dataclass(frozen=True)
class Needs:
    """The bytes of a forward and its backward, beside those that last from step to step."""

    lasting: int
    """The bytes that last: parameters, gradients, optimiser state, and all else of the account but other forwards and
    what lies elsewhere."""
    least_held: int
    """Held between forward and backward, by the plan that holds least."""
    least_peak: int
    """The most that this plan holds at once."""
    held: int
    """Held between forward and backward, with nothing recomputed."""
    peak: int
    """The most that is held at once, with nothing recomputed."""

    @classmethod
    def of(cls, plan: Plan) -> Needs:
        """The needs of a planned step, which has its graphs; without what other code takes until the backward."""
        account = replace(plan.account, meanwhile=0)
        step = plan.solved[0].under(account)
        problem = step.problem.problem
        plain, least = Schedule.save_all(problem), least_plan(plan)
        step.traced.forget_solvers()
        with_gradients = lasting_bytes(account, beside=True)
        return cls(
            lasting_bytes(account),
            least.held_bytes,
            backward_bytes(least),
            held_after_forward(problem, plain),
            max(0, breakdown(problem, plain, account).peak_bytes - with_gradients),
        )

    def holding(self, nbytes: int) -> Needs:
        """The needs of a step whose caller takes that many bytes until the backward."""
        least, most = max(self.least_peak, self.least_held + nbytes), max(self.peak, self.held + nbytes)
        return replace(self, least_peak=least, peak=most)

    def at_most(self, other: Needs) -> Needs:
        """Needs that cover both: of each number of bytes the larger one."""
        return Needs(*(max(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


def lasting_bytes(account: Account, *, beside: bool = False) -> int:
    """The bytes of a step that last, with its gradients; `beside`: with other forwards and what lies elsewhere."""
    gradients = 0 if account.gradients_held else account.gradients
    others = 0 if beside else account.other_forwards + account.elsewhere
    return account.resident_bytes + gradients - others


def backward_bytes(plan: Plan) -> int:
    """The most that a planned forward or backward, or the optimiser's step, holds beside what lasts; without what other
    code takes between them."""
    alone = _with_meanwhile(plan, 0) if plan.account.meanwhile else plan
    return max(0, alone.ceiling_bytes - lasting_bytes(plan.account, beside=True))


def tangent_bytes(plan: Plan) -> int:
    """The bytes of the gradients with which the backward of a plan begins where the loss is outside of the model; 0 for
    a plan without its graphs."""
    captured = None if plan.source is None else plan.captured
    return 0 if captured is None else captured.tangent_bytes


def least_plan(plan: Plan) -> Plan:
    """The plan of the same step whose forward holds least until its backward, at about the smallest peak. Its budget
    is that of `plan`."""
    account = replace(plan.account, meanwhile=0)
    bare = replace(account, rounding=0, fragmentation=0) if account.caching else account
    step = Priced(plan.solved[0], bare).under(bare)
    smallest_bytes = step.smallest()[0]
    for part in _SLACK:
        budget_bytes = smallest_bytes + (smallest_bytes // part if part else 0)
        with suppress(BudgetError):
            try:
                found = step.under(replace(bare, meanwhile=budget_bytes)).solve(budget_bytes, plan.effort)
            except BudgetError as refused:
                room = budget_bytes - (refused.smallest_bytes - budget_bytes)
                found = step.under(replace(bare, meanwhile=room)).solve(budget_bytes, plan.effort)
            return _in_place_of(plan, found)
    return _in_place_of(plan, step.solve(smallest_bytes, plan.effort))


def leaving_room(plan: Plan) -> Plan:
    """A plan in the place of this one, for a step of which it is not known yet what other models will hold beside it:
    the plan itself where as much as the step holds with nothing recomputed is left free, else the one that holds
    least."""
    free = plan.budget_bytes - plan.ceiling_bytes
    if plan.added_time <= NEGLIGIBLE and free >= plan.plain.peak_bytes - lasting_bytes(plan.account, beside=True):
        return plan
    return least_plan(plan)


def leaving_free(plan: Callable[[int], Plan], spared_bytes: int) -> Plan:
    """The result of `plan` with as many of these bytes left free between forward and backward as the budget allows; 0
    is the last number that it is asked for. Raises the `BudgetError` of that."""
    if not spared_bytes:
        return plan(0)

    def alone(nbytes: int) -> Plan:
        found = plan(nbytes)
        return _with_meanwhile(found, found.account.meanwhile - nbytes)

    with suppress(BudgetError):
        try:
            return alone(spared_bytes)
        except BudgetError as refused:
            less = spared_bytes - (refused.smallest_bytes - refused.budget_bytes)
        if less > 0:
            return alone(less)
    return plan(0)


def _with_meanwhile(plan: Plan, nbytes: int) -> Plan:
    """The plan with the figures of a step in which other code takes that many bytes until the backward."""
    account = replace(plan.account, meanwhile=nbytes)
    step = plan.solved[0].under(account)
    shown = replace(plan, source=StepOfPlan(lambda: step))
    return recounted(shown, account, plain=plain_step(step.plain, account))


def _in_place_of(plan: Plan, found: Plan) -> Plan:
    """A plan for a smaller budget in the place of one for the budget that there is, with what was told of that one."""
    told = {name: getattr(plan, name) for name in ("budget_bytes", "levers", "proposals", "receipt", "notes")}
    return replace(_with_meanwhile(found, plan.account.meanwhile), **told)

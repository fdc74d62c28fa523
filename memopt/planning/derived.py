"""Plans that are derived from other plans: for a forward while other forwards wait for their backward, for a step with
further regions, and with bytes left free for the steps of other models. `StepBytes` has the bytes of a step, from which
follows how many bytes other plans must leave free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from memopt.account.account import ANY_LINK, Account, breakdown, live_versions
from memopt.errors import BudgetError
from memopt.planning.figures import plain_beside, plain_step, recounted, rows_to
from memopt.planning.joined import Joined, within
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.planner import NEGLIGIBLE, smallest
from memopt.planning.schedule_parts import evaluations_until_return, forward_evaluations, halves, held_after_forward
from memopt.planning.stages import Priced, StepOfPlan
from memopt.solver import RematProblem, Schedule, Solution, simulate
from memopt.units import size

_ROUNDS = 4
"""How often the bytes left for the other forwards are refined after a first plan was found."""
_MARGIN = 16
"""A guess lies at least one part in this many of the remaining interval away from both of its ends."""
_CLOSE = 64
"""An interval of less than one part in this many of the budget is not worth another round."""


def among_equals(
    beside: Callable[[int], Plan], others: int, budget_bytes: int, least_of: Callable[[Plan], Plan] | None = None
) -> Plan:
    """The fastest plan found of a forward that leaves room for `others` further forwards, each of which holds as much
    as this plan does between forward and backward.

    Args:
        beside: returns the plan of the forward in the part of the budget that is left while other forwards hold the
            given number of bytes; a negative number makes the budget larger. Raises `BudgetError`.
        budget_bytes: the budget for all of these forwards.
        least_of: returns the plan of the same step that holds least between forward and backward; it is tried where a
            plan of the smallest peak holds too much. None: such a plan is not tried.

    Raises `BudgetError`, with a budget that works, where no plan leaves enough room."""

    def least(plan: Plan, others_bytes: int) -> tuple[Plan, int]:
        """The plan that holds least, made beside `others_bytes`, and the bytes in which the others have room."""
        assert least_of is not None
        found = least_of(plan)
        return found, found.ceiling_bytes - others_bytes + others * found.held_bytes

    try:
        found = beside(0)
    except BudgetError as refused:
        room = budget_bytes - refused.smallest_bytes
        alone = beside(room)
        works_bytes = refused.smallest_bytes + others * alone.held_bytes
        if least_of:
            works_bytes = min(works_bytes, least(alone, room)[1])
        raise _refusal(budget_bytes, works_bytes, others, alone) from None
    low, lacking = 0, others * found.held_bytes  # the bytes that the others lack if `low` is left for them
    high = lacking
    try:
        found = beside(high)
    except BudgetError as refused:
        high -= refused.smallest_bytes - budget_bytes
        found = beside(high)
        if (missing := others * found.held_bytes - high) > 0:
            works_bytes = budget_bytes + missing
            if least_of:
                tight, needed_bytes = least(found, high)
                if needed_bytes <= budget_bytes:
                    return tight
                works_bytes = min(works_bytes, needed_bytes)
            raise _refusal(budget_bytes, works_bytes, others, found) from None
    spare = high - others * found.held_bytes
    for _ in range(_ROUNDS):
        if found.added_time <= NEGLIGIBLE or high - low <= budget_bytes // _CLOSE:
            break
        keep = (high - low) // _MARGIN
        middle = min(high - keep, max(low + keep, low + (high - low) * lacking // max(1, lacking + spare)))
        closer = beside(middle)
        if (needed := others * closer.held_bytes) <= middle:
            found, high = closer, middle
            spare = high - needed
        else:
            low, lacking = middle, needed - middle
            spare //= 2  # as in the Illinois method (regula falsi), without which guesses approach from below only
    return found


def _refusal(budget_bytes: int, works_bytes: int, others: int, plan: Plan) -> BudgetError:
    """The error for a budget that leaves too little room for `others` beside this plan; `works_bytes` leaves enough."""
    reason = f"{others + 1} forwards of this model before the first backward"
    if elsewhere := plan.account.elsewhere:
        reason += f", elsewhere {size(elsewhere)}"
    return BudgetError(budget_bytes, works_bytes, reason, least=False)


METHOD = "known regions as before"


def extended(plan: Plan, priced: Priced, known: Sequence[int | None]) -> Plan | None:
    """The plan of `priced` with the schedules of `plan`, found without a search. None where it would exceed the budget
    or add more time than `plan` does, and where `plan` offloads or steps parameters within its backward.

    Args:
        known: for each region of `priced`, the number of the region of `plan` whose schedule it takes; None for a
            region that recomputes nothing."""
    step, schedule = plan.solved
    before = step.problem
    if schedule.offloads or before.steps:
        return None
    joined = priced.step.problem
    taken = _schedule(joined, before, schedule, known)
    account = replace(priced.account, expandable=plan.account.expandable)
    fitted = within(joined, taken, account, plan.budget_bytes)
    if fitted is None:
        return None
    simulation = simulate(joined.problem, taken)
    solution = Solution(taken, simulation.peak_bytes, simulation.added_seconds, 0.0, METHOD)
    found = priced.planned(joined, solution, fitted, plan.budget_bytes, plan.effort)
    if found.ceiling_bytes > plan.budget_bytes or found.added_time > max(NEGLIGIBLE, plan.added_time):
        return None
    rows = rows_to(found, [ReceiptRow("", found.plain.peak_bytes, found.step_seconds)])
    notes = found.notes + tuple(note for note in plan.notes if note not in step.traced.all_notes)
    return replace(found, levers=plan.levers, receipt=rows, notes=notes)


def _schedule(joined: Joined, before: Joined, schedule: Schedule, known: Sequence[int | None]) -> Schedule:
    """The evaluations of all forwards in order, then of all backwards from the last to the first. A region evaluates
    its operators in the order in which `schedule` evaluates those of the region of `before` that `known` gives for it;
    where `known` gives none, or one with other operators, each once in program order."""
    parts = halves(before, schedule)
    forwards: list[int] = []
    backwards: list[list[int]] = []
    index_of = {owner: index for index, owner in enumerate(joined.owner)}
    for number, at in enumerate(known):
        problem = joined.prices[number].problem
        forward, backward = [*range(problem.forward_ops)], [*range(problem.forward_ops, len(problem.ops))]
        if at is not None and _same_ops(joined, number, before, at):
            forward, backward = (
                [before.owner[schedule.evaluations[position]][1] for position in half] for half in parts[at]
            )
        forwards += [index_of[number, local] for local in forward]
        backwards.append([index_of[number, local] for local in backward])
    return Schedule((*forwards, *(index for part in reversed(backwards) for index in part)))


def _same_ops(joined: Joined, number: int, before: Joined, at: int) -> bool:
    """Whether two regions have the same operators, whatever their sizes."""
    one, other = joined.prices[number].problem, before.prices[at].problem
    return one.forward_ops == other.forward_ops and [op.name for op in one.ops] == [op.name for op in other.ops]


_SLACK = 0, 16, 8, 4, 2
"""How far the peak of the plan that holds least may lie above the smallest peak: not at all (0), then by 1/16, 1/8, 1/4
and 1/2 of it. The first with which there is a plan is used."""


@dataclass(frozen=True)
class StepBytes:
    """The bytes that a forward and its backward hold, counted apart from those that stay from step to step."""

    lasting: int
    """The bytes that last: all of the account but other forwards and what lies elsewhere."""
    least_held: int
    """Held between forward and backward, by the plan that holds least."""
    least_peak: int
    """The peak of that plan."""
    held: int
    """Held between forward and backward, with nothing recomputed."""
    peak: int
    """The peak with nothing recomputed."""

    @classmethod
    def of(cls, plan: Plan) -> StepBytes:
        """The bytes of a planned step, which must have its graphs, without those that the caller's code allocates."""
        account = replace(plan.account, meanwhile=0)
        step = plan.solved[0].under(account)
        problem = step.problem.problem
        plain, least = Schedule.save_all(problem), least_plan(plan)
        step.traced.forget_solvers()
        with_gradients = lasting_bytes(account, beside=True)
        return cls(
            lasting_bytes(account),
            least.held_bytes,
            peak_above_lasting(least),
            held_after_forward(problem, plain),
            max(0, breakdown(problem, plain, account).peak_bytes - with_gradients),
        )

    def with_callers_code(self, nbytes: int) -> StepBytes:
        """The bytes of the same step where the caller's code allocates `nbytes` between forward and backward."""
        least, most = max(self.least_peak, self.least_held + nbytes), max(self.peak, self.held + nbytes)
        return replace(self, least_peak=least, peak=most)

    def covering(self, other: StepBytes) -> StepBytes:
        """Bytes that cover this step and another: of each field the larger value."""
        return StepBytes(*(max(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


def lasting_bytes(account: Account, *, beside: bool = False) -> int:
    """The bytes of a step that stay from step to step: parameters, gradients, optimizer state and the like; with
    `beside` also other forwards, and what lies elsewhere."""
    gradients = 0 if account.gradients_held else account.gradients
    others = 0 if beside else account.other_forwards + account.elsewhere
    return account.resident_bytes + gradients - others


def peak_above_lasting(plan: Plan) -> int:
    """The peak in bytes of a whole planned step, less what lasts from step to step or lies elsewhere
    (`lasting_bytes(account, beside=True)`), and less what the caller's code allocates between forward and backward."""
    alone = _under(plan, replace(plan.account, meanwhile=0)) if plan.account.meanwhile else plan
    return max(0, alone.ceiling_bytes - lasting_bytes(plan.account, beside=True))


def forward_bytes(plan: Plan) -> int:
    """The peak of a planned forward in bytes, less what is resident; 0 for a plan without its graphs."""
    if plan.joined is None or plan.schedule is None:
        return 0
    return peak_in_forward(plan.joined.problem, plan.schedule)


def peak_in_forward(problem: RematProblem, schedule: Schedule) -> int:
    """The peak in bytes of a schedule until its forward returns, less what is resident."""
    return _peak_within(problem, schedule, evaluations_until_return(problem, schedule))


def _peak_within(problem: RematProblem, schedule: Schedule, evaluations: int) -> int:
    live = simulate(problem, schedule, ANY_LINK).live_bytes[:evaluations]
    return int(live.max(initial=problem.resident_bytes)) - problem.resident_bytes


def returned_bytes(plan: Plan) -> int:
    """The bytes of the outputs of a planned call, which are free for other use once the caller drops them.

    0 where they cannot be relied on: for a plan without its graphs; for a call of several regions, since regions pass
    values on; and on a card, where freed outputs leave gaps between other blocks."""
    if plan.joined is None or len(plan.joined.prices) > 1 or plan.account.caching:
        return 0
    return plan.joined.problem.output_bytes


def with_kept_outputs(priced: Priced, returned: int = 0) -> int:
    """The smallest budget in bytes of a step where the caller still holds the outputs of the previous step during the
    forward. They have `returned` bytes; 0: as the outputs of the step's problem, of one region."""

    def of(way: Priced) -> int:
        joined = way.step.problem
        in_forward = peak_in_forward(joined.problem, joined.smallest.schedule)
        outputs = returned or joined.problem.output_bytes
        return max(smallest(joined, way.account)[0], way.account.resident_bytes + in_forward + outputs)

    return min(map(of, priced.on_either_side()))


def nothing_recomputed(priced: Priced, returned: int = 0) -> int:
    """The peak in bytes of a step with nothing recomputed. During the forward, the caller is assumed to hold what is
    left of the previous step: its outputs (`returned` bytes) or the gradients of its outputs, whichever are larger."""
    plain = priced.step.plain
    schedule = Schedule.save_all(plain.problem)
    until_backward = _peak_within(plain.problem, schedule, forward_evaluations(plain.problem, schedule))
    kept = max(returned, priced.step.traced.tangent_bytes)
    return max(plain_step(plain, priced.account).peak_bytes, priced.account.resident_bytes + until_backward + kept)


def tangent_bytes(plan: Plan) -> int:
    """The bytes of the gradients that the backward begins with, for a loss outside of the model; else 0."""
    return 0 if plan.captured is None else plan.captured.tangent_bytes


def least_plan(plan: Plan, most_bytes: float = math.inf) -> Plan:
    """The plan of the same step that holds the fewest bytes between forward and backward, at a peak near the smallest
    and of at most `most_bytes`; `plan` itself where no such plan is found. Its `budget_bytes` is that of `plan`."""
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
            if (least := _in_place_of(plan, found)).ceiling_bytes <= most_bytes:
                return least
    least = _in_place_of(plan, step.solve(smallest_bytes, plan.effort))
    return least if least.ceiling_bytes <= most_bytes else plan


def leaving_room(plan: Plan) -> Plan:
    """The plan to use while it is not known what other models will allocate during the step. It is `plan` itself where
    that adds next to no time, and leaves at least as many bytes free as the step holds with nothing recomputed; else
    its `least_plan`."""
    free = plan.budget_bytes - plan.ceiling_bytes
    if plan.added_time <= NEGLIGIBLE and free >= plan.plain.peak_bytes - lasting_bytes(plan.account, beside=True):
        return plan
    return least_plan(plan, plan.budget_bytes)


def leaving_free(plan: Callable[[int, int], Plan], spared_bytes: int, staying_bytes: int = 0) -> Plan:
    """A plan that leaves `spared_bytes` free between forward and backward, and `staying_bytes` of these until the
    backward ends. Where the budget is too small for both, `staying_bytes` is lowered first, down to 0, and then
    `spared_bytes`.

    `plan(nbytes, staying)` makes a plan that leaves these two numbers of bytes free, or raises `BudgetError`. The last
    attempt is `plan(0, 0)`, whose error is passed on. The bytes left free do not count as used."""

    def alone(nbytes: int, staying: int) -> Plan:
        found = plan(nbytes, staying)
        account = replace(found.account, other_forwards=found.account.other_forwards - staying)
        return _under(found, replace(account, meanwhile=account.meanwhile - (nbytes - staying)))

    for staying in dict.fromkeys((staying_bytes, 0) if spared_bytes else ()):
        with suppress(BudgetError):
            try:
                return alone(spared_bytes, staying)
            except BudgetError as refused:
                lacking = refused.smallest_bytes - refused.budget_bytes
            if (staying or spared_bytes) > lacking:
                return alone(spared_bytes - (0 if staying else lacking), staying and staying - lacking)
    return plan(0, 0)


def retained_peak(plan: Plan, schedule: Schedule) -> int:
    """The step's peak in bytes if nothing saved for the backward is freed before its end (`retain_graph=True`).

    An offloaded value whose memory on the device would be freed only after the backward has begun stays there too. It
    counts a second time beside its copy that is fetched back."""
    assert plan.joined is not None
    problem = plan.joined.problem
    boundary = forward_evaluations(problem, schedule)
    saved = {storage for storage, made in live_versions(problem, schedule, boundary) if made < boundary}
    storages = [replace(one, kept=one.kept or number in saved) for number, one in enumerate(problem.storages)]
    late = [offload for offload in schedule.offloads if offload.storage in saved]
    early = replace(schedule, offloads=tuple(offload for offload in schedule.offloads if offload.storage not in saved))
    peak = breakdown(replace(problem, storages=tuple(storages)), early, plan.account).peak_bytes
    return peak + sum(problem.storages[offload.storage].bytes for offload in late)


def _under(plan: Plan, account: Account) -> Plan:
    """The plan with the figures of a step with another account."""
    step = plan.solved[0].under(account)
    shown = replace(plan, source=StepOfPlan(lambda: step))
    return recounted(shown, account, plain=plain_beside(step, plan.solved[1], account))


def _in_place_of(plan: Plan, found: Plan) -> Plan:
    """`found`, a plan of the same step for a smaller budget, with the budget, levers, receipt and notes of `plan`."""
    told = {name: getattr(plan, name) for name in ("budget_bytes", "levers", "proposals", "receipt", "notes")}
    return replace(_under(found, replace(found.account, meanwhile=plan.account.meanwhile)), **told)

"""Plans that follow from others: of a forward beside others like it, and of a step with further regions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from memopt.errors import BudgetError
from memopt.planning.figures import schedule_rows
from memopt.planning.joined import Joined
from memopt.planning.on_card import within
from memopt.planning.plan import Plan, ReceiptRow
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.stages import Priced
from memopt.solver import Schedule, Solution, simulate
from memopt.units import size

_ROUNDS = 4
"""How often the room for the others is narrowed down after a plan was found."""
_MARGIN = 16
"""Of what is left to narrow down, the part that a guess keeps from either end."""
_CLOSE = 64
"""Room that differs by less than this part of the budget is not worth another round."""


def among_equals(
    beside: Callable[[int], Plan], others: int, budget_bytes: int, least_of: Callable[[Plan], Plan] = lambda plan: plan
) -> Plan:
    """The fastest plan found that leaves room for `others` further forwards that each hold as much as it does.

    Args:
        beside: the plan of the forward where others hold that many bytes, which may be negative: a plan for a larger
            budget. Raises `BudgetError`.
        least_of: the plan of the same step that holds least until its backward.

    Raises `BudgetError` where no plan leaves enough room, with a budget that does.
    """
    try:
        found = beside(0)
    except BudgetError as refused:
        alone = beside(budget_bytes - refused.smallest_bytes)
        raise _refusal(
            budget_bytes, min(_whole(one, others) for one in (alone, least_of(alone))), others, alone
        ) from None
    low, lacking = 0, others * _held(found)  # what the others lack where they have `low`
    high = lacking
    try:
        found = beside(high)
    except BudgetError as refused:
        high -= refused.smallest_bytes - budget_bytes
        found = beside(high)
        if others * _held(found) > high:
            least = least_of(found)
            if _whole(least, others) > budget_bytes:
                works_bytes = min(budget_bytes + others * _held(found) - high, _whole(least, others))
                raise _refusal(budget_bytes, works_bytes, others, found) from None
            return least
    spare = high - others * _held(found)
    for _ in range(_ROUNDS):
        if found.added_time <= NEGLIGIBLE or high - low <= budget_bytes // _CLOSE:
            break
        keep = (high - low) // _MARGIN
        middle = min(high - keep, max(low + keep, low + (high - low) * lacking // max(1, lacking + spare)))
        closer = beside(middle)
        if (needed := others * _held(closer)) <= middle:
            found, high = closer, middle
            spare = high - needed
        else:
            low, lacking = middle, needed - middle
            spare //= 2  # as in the Illinois method: else guesses would creep up from below
    return found


def _refusal(budget_bytes: int, works_bytes: int, others: int, plan: Plan) -> BudgetError:
    """The error for a budget that leaves others too little room beside this plan, with one that leaves enough."""
    reason = f"{others + 1} forwards of this model before the first backward"
    if elsewhere := plan.account.elsewhere:
        reason += f", elsewhere {size(elsewhere)}"
    return BudgetError(budget_bytes, works_bytes, reason, least=False)


def _whole(plan: Plan, others: int) -> int:
    """The bytes that a step by a plan holds beside so many other forwards by it."""
    return plan.ceiling_bytes - plan.account.other_forwards + others * _held(plan)


def _held(plan: Plan) -> int:
    """The bytes that the plan's forward holds until its backward."""
    return plan.held_bytes


METHOD = "known regions as before"


def extended(plan: Plan, priced: Priced, known: Sequence[int | None]) -> Plan | None:
    """The plan of `priced` by the schedules of `plan`, without a search; None where that exceeds the budget, adds
    more time than the plan did, or the plan offloads.

    Args:
        known: for each region of `priced`, the number of the region of `plan` whose schedule it takes, or None.
    """
    step, schedule = plan.solved
    before = step.problem
    if schedule.offloads or before.steps:
        return None
    joined = priced.step.problem
    taken = _schedule(joined, before, schedule, known)
    fitted = within(joined, taken, priced.account, plan.budget_bytes)
    if fitted is None:
        return None
    simulation = simulate(joined.problem, taken)
    solution = Solution(taken, simulation.peak_bytes, simulation.added_seconds, 0.0, METHOD)
    found = priced.planned(joined, solution, fitted, plan.budget_bytes, plan.effort)
    if found.ceiling_bytes > plan.budget_bytes or found.added_time > max(NEGLIGIBLE, plan.added_time):
        return None
    rows = (ReceiptRow("", found.plain.peak_bytes, found.step_seconds), *schedule_rows(found))
    notes = found.notes + tuple(note for note in plan.notes if note not in step.traced.all_notes)
    return replace(found, levers=plan.levers, receipt=rows, notes=notes)


def _schedule(joined: Joined, before: Joined, schedule: Schedule, known: Sequence[int | None]) -> Schedule:
    """The evaluations of all forwards in order, then of all backwards from the last to the first, each as before."""
    parts = _parts(before, schedule)
    forwards: list[int] = []
    backwards: list[list[int]] = []
    index_of = {owner: index for index, owner in enumerate(joined.owner)}
    for number, at in enumerate(known):
        problem = joined.prices[number].problem
        forward, backward = [*range(problem.forward_ops)], [*range(problem.forward_ops, len(problem.ops))]
        if at is not None and _same_ops(joined, number, before, at):
            forward, backward = parts[at]
        forwards += [index_of[number, local] for local in forward]
        backwards.append([index_of[number, local] for local in backward])
    return Schedule((*forwards, *(index for part in reversed(backwards) for index in part)))


def _parts(joined: Joined, schedule: Schedule) -> list[tuple[list[int], list[int]]]:
    """For each region the ops of its own problem in the order in which they are evaluated: up to the last op of the
    forward, and after it."""
    forwards: list[list[int]] = [[] for _ in joined.prices]
    backwards: list[list[int]] = [[] for _ in joined.prices]
    begun = [priced.problem.forward_ops == 0 for priced in joined.prices]
    for index in schedule.evaluations:
        region, local = joined.owner[index]
        (backwards if begun[region] else forwards)[region].append(local)
        begun[region] |= local == joined.prices[region].problem.forward_ops - 1
    return list(zip(forwards, backwards, strict=True))


def _same_ops(joined: Joined, number: int, before: Joined, at: int) -> bool:
    """Whether two regions have the same operators, whatever their sizes."""
    one, other = joined.prices[number].problem, before.prices[at].problem
    same = one.forward_ops == other.forward_ops and len(one.ops) == len(other.ops)
    return same and all(ours.name == theirs.name for ours, theirs in zip(one.ops, other.ops, strict=True))

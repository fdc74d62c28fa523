"""The plan of a forward that runs beside others like it before their first backward, as two views of a batch do."""

from __future__ import annotations

from collections.abc import Callable

from memopt.errors import BudgetError
from memopt.planning.plan import Plan
from memopt.planning.planner import LITTLE
from memopt.units import size

_ROUNDS = 4
"""How often the room for the others is narrowed down after a plan was found."""
_MARGIN = 16
"""Of what is left to narrow down, the part that a guess keeps from either end."""
_CLOSE = 64
"""Room that differs by less than this part of the budget is not worth another round."""


def among_equals(beside: Callable[[int], Plan], others: int, budget_bytes: int) -> Plan:
    """The fastest plan found that leaves room for `others` further forwards that each hold as much as it does.

    Args:
        beside: the plan of the forward where others hold that many bytes, which may be negative: a plan for a larger
            budget. Raises `BudgetError`.

    Raises `BudgetError` where no plan leaves enough room, with a budget that does.
    """
    try:
        found = beside(0)
    except BudgetError as refused:
        alone = beside(budget_bytes - refused.smallest_bytes)
        smallest_bytes = refused.smallest_bytes + others * _held(alone)
        raise _refusal(budget_bytes, smallest_bytes, others, alone) from None
    low, lacking = 0, others * _held(found)  # what the others lack where they have `low`
    high = lacking
    try:
        found = beside(high)
    except BudgetError as refused:
        high -= refused.smallest_bytes - budget_bytes
        found = beside(high)
        missing = others * _held(found) - high
        if missing > 0:
            raise _refusal(budget_bytes, budget_bytes + missing, others, found) from None
    spare = high - others * _held(found)
    for _ in range(_ROUNDS):
        if found.added_time <= LITTLE or high - low <= budget_bytes // _CLOSE:
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


def _held(plan: Plan) -> int:
    """The bytes that the plan's forward holds until its backward."""
    return plan.held_bytes

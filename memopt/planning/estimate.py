"""Whether a budget is enough for a call, from one capture and one trace, without looking for its best plan."""

from __future__ import annotations

import torch

from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.errors import BudgetError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.joined import Joined
from memopt.planning.planner import Request, smallest, solve_on_card
from memopt.planning.situation import Situation
from memopt.planning.stages import Recorded

_NEAR = 1.25
"""A lever set that needs up to this many times the budget is solved for it: another schedule may leave fewer gaps."""


def estimated_bytes(planner: CallPlanner, call: Call) -> int:
    """About the smallest budget in bytes within which a call can be planned, under all allowed levers at once or fewer
    of them; levers on parameters and optimiser are left out.

    It is no more than the budget given wherever a schedule within that is found. Raises `CaptureError`.
    """
    budget_bytes = planner.terms.options.budget_bytes
    found: list[int] = []
    with planner.terms.types(), torch.enable_grad():
        recorded = Recorded(planner, planner.capture_on_fakes(call, None), call, Situation())
        for levers in reversed(planner.terms.lever_sets):
            try:
                traced = recorded.trace(levers)
            except NothingToRewrite:  # the newest lever of the set; the set before it is the same without it
                continue
            priced = traced.price(traced.account())
            request = Request(priced.account, budget_bytes, planner.terms.options.effort)
            found.append(_needed_bytes(priced.step.problem, request))
            # On the CPU a set with fewer levers needs less in rare cases only.
            if not priced.account.caching or not budget_bytes < found[-1] <= _NEAR * budget_bytes:
                break
    return min(found)


def _needed_bytes(joined: Joined, request: Request) -> int:
    """The bytes of the schedule with the smallest peak, at most the budget where any schedule is within that.

    On a GPU the smallest peak is not the least that is needed: the allocator's fragmentation differs from schedule to
    schedule by a quarter of the step and more.
    """
    least, budget_bytes = smallest(joined, request.account)[0], request.budget_bytes
    if not request.account.caching or not budget_bytes < least <= _NEAR * budget_bytes:
        return least
    try:
        solve_on_card(joined, request)
    except BudgetError:
        return least
    return budget_bytes

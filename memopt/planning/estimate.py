"""Whether a budget is enough for a call, from one capture and one trace, without looking for its best plan."""

from __future__ import annotations

import torch

from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.errors import BudgetError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.captured import Joined
from memopt.planning.planner import Request, smallest, solve_on_card
from memopt.planning.situation import Situation


def estimated_bytes(planner: CallPlanner, call: Call) -> int:
    """About the smallest budget in bytes within which a call can be planned: that under all allowed levers at once.

    It is no more than the budget given wherever a schedule within that is found. A set with fewer levers needs less
    only in rare cases; levers on parameters and optimiser are left out. Raises `CaptureError`.
    """
    situation = Situation()
    with planner.types(), torch.enable_grad():
        captured = planner.capture_on_fakes(call, None)
        account = planner.captured_account(captured, call, situation)
        for levers in reversed(planner.lever_sets):
            try:
                step = planner.rewrite_and_price(captured, call, situation, levers)
            except NothingToRewrite:  # the newest lever of the set; the set before it is the same without it
                continue
            request = Request(account, planner.options.budget_bytes, planner.options.effort)
            return _needed_bytes(step.joined(accumulating=False), request)
    raise AssertionError("the first lever set rewrites nothing")


def _needed_bytes(joined: Joined, request: Request) -> int:
    """The bytes of the schedule with the smallest peak, at most the budget where any schedule is within that.

    On a GPU the smallest peak is not the least that is needed: the allocator's fragmentation differs from schedule to
    schedule by a quarter of the step and more.
    """
    least, budget_bytes = smallest(joined, request.account)[0], request.budget_bytes
    if least <= budget_bytes or not request.account.context:
        return least
    try:
        solve_on_card(joined, request)
    except BudgetError:
        return least
    return budget_bytes

"""The smallest budget of a call, from one capture and one trace, without looking for its plan."""

from __future__ import annotations

import torch

from memopt.capture.inputs import Call
from memopt.capture.operators import NothingToRewrite
from memopt.planning.call_planner import CallPlanner
from memopt.planning.planner import smallest
from memopt.planning.situation import Situation


def estimated_bytes(planner: CallPlanner, call: Call) -> int:
    """About the smallest budget in bytes within which a call can be planned: that under all allowed levers at once.

    A set with fewer levers needs less only in rare cases; levers on parameters and optimiser are left out. Raises
    `CaptureError`.
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
            return smallest(step.joined(accumulating=False), account)[0]
    raise AssertionError("the first lever set rewrites nothing")

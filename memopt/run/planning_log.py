"""One line in the log for each set of shapes that is planned, with the seconds that it took."""

from __future__ import annotations

import logging
from typing import Any

import torch

from memopt.capture.inputs import Call, call_signature
from memopt.compat.operators import tree_leaves
from memopt.planning.plan import Plan
from memopt.recent import Recent
from memopt.units import duration, size

_log = logging.getLogger("memopt")
_MOST = 512
"""The number of signatures that are remembered to have a line."""


class PlanningLog:
    """Logs plans at level INFO of the logger "memopt"; at DEBUG those of shapes that have a line already."""

    def __init__(self) -> None:
        self._known: Recent[str, bool] = Recent(_MOST)

    def planned(self, plan: Plan, call: Call, seconds: float) -> None:
        """Log a plan. `seconds` is the time from the beginning of the call to the plan's first use, or to its end where
        it is made ahead."""
        signature = call_signature(call)
        level = logging.DEBUG if signature in self._known else logging.INFO
        self._known[signature] = True
        _log.log(
            level,
            "planned %s for %s in %s: peak %s of %s, added time %.1f%%",
            plan.model,
            shapes_of(call),
            duration(seconds),
            size(plan.predicted_peak_bytes),
            size(plan.budget_bytes),
            100 * plan.added_time,
        )


def shapes_of(call: Call) -> str:
    """The shapes of the tensors of a call, with the names of keywords."""
    named = [*(("", value) for value in call[0]), *call[1].items()]
    return ", ".join(f"{name} {shape}".strip() for name, value in named for shape in _shapes(value)) or "no tensors"


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

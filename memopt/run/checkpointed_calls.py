"""Training calls that run in eager mode with activation checkpoints, where no plan of their regions fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from memopt.capture.inputs import Call
from memopt.compat.modules import Parts
from memopt.errors import BudgetError, CaptureError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.terms import Situation
from memopt.run.checkpoints import choices
from memopt.run.entry import Entry
from memopt.run.ledger import Moment
from memopt.run.plain_calls import CountedStep, PlainCalls

_WORTH_NAMING = 2
"""A call that is in no graph is counted for a refusal up to this many times its budget: it runs for that."""


class CheckpointedCalls:
    """Runs calls as the plain model does, but for modules that are activation checkpoints: of several choices of these
    the fastest whose step fits the budget.

    What code between the regions of a broken forward holds is in no graph, so that no plan can free it; here the code
    itself runs a second time.
    """

    def __init__(
        self, model: nn.Module, planner: CallPlanner, loss_fn: Callable[..., Any] | None, entry: Entry
    ) -> None:
        self.model, self.planner, self.loss_fn, self.entry = model, planner, loss_fn, entry
        self.serve = False
        """Whether a call has run so: then further ones are tried so before they are planned."""

    @cached_property
    def _calls(self) -> tuple[PlainCalls, ...]:
        """One for each choice of modules."""
        found = choices(self.model) if "recompute" in self.planner.terms.options.allow else ()
        return tuple(PlainCalls(self.model, self.planner, self.loss_fn, self.entry, one) for one in found)

    def fitting(
        self, call: Call, situation: Situation, moment: Moment, parts: Parts
    ) -> tuple[PlainCalls, CountedStep] | None:
        """The choice by which a call fits the budget, and its step; None where there is none."""
        for now in dict.fromkeys((moment, replace(moment, closely=True))):
            for calls in self._calls:
                fits = calls.step_if_it_fits(call, situation, now, parts, plans_serve_all=False)
                if fits is not None:
                    self.serve = True
                    return calls, fits
        return None

    def forget(self) -> None:
        """Have modules chosen, and calls counted, again."""
        vars(self).pop("_calls", None)

    def explain(
        self,
        refused: BudgetError | CaptureError,
        broken: str | None,
        call: Call,
        situation: Situation,
        moment: Moment,
    ) -> BudgetError | CaptureError:
        """The refusal of a call, with the smallest budget by which it runs so, where there is none by a plan or that is
        larger; and with the reason `broken` why it breaks into regions, if it does."""
        if isinstance(refused, CaptureError):
            budget = self.planner.terms.options.budget_bytes
            least = self._least(call, situation, moment, _WORTH_NAMING * budget)
            if least is None:
                return refused
            return BudgetError(budget, least, "modules that run as activation checkpoints", further=(str(refused),))
        if broken is None:
            return refused
        least = self._least(call, situation, moment, refused.smallest_bytes) or refused.smallest_bytes
        further = [f"no plan frees what code between the regions of its forward holds, which breaks: {broken}"]
        if least < refused.smallest_bytes:
            further.append("with the smallest budget its modules run as activation checkpoints")
        return refused.adding(*further, smallest_bytes=least)

    def _least(self, call: Call, situation: Situation, moment: Moment, most_bytes: int) -> int | None:
        """The smallest budget in bytes by which a call runs with checkpoints; None where it is above `most_bytes`."""
        least: int | None = None
        for calls in self._calls:
            least = calls.needed_bytes(call, situation, moment, least or most_bytes) or least
        return least

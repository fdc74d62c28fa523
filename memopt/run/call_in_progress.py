"""A planned training call while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from memopt.account.elsewhere import in_steps
from memopt.capture.inputs import Call
from memopt.errors import BudgetError
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.ledger import Moment
from memopt.run.pending import PendingForward

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class CallInProgress:
    """A training call that is being run, and its situation."""

    call: Call
    situation: Situation
    """The situation of the call, without what is beside it."""
    moment: Moment
    """What lies on the device beside the call: forwards that wait for their backward, and bytes elsewhere."""
    begin_forward: Callable[[Plan, Situation, int], PendingForward]

    @property
    def crowded(self) -> Situation:
        """The situation with the forwards that wait for their backward."""
        return replace(self.situation, other_forwards=self.moment.waiting_bytes)

    def fitting(
        self, make: Callable[[Situation], Made], plan_of: Callable[[Made], Plan], known: Callable[[Situation], bool]
    ) -> Made:
        """The result of `make` for the first situation whose plan fits beside everything else on the device.

        `known` says whether there is a plan for a situation already: before another one is made, which takes longer
        than a look, what lies elsewhere is looked for. Raises the `BudgetError` of a plan that leaves room for it where
        there is none.
        """
        made = make(self.situation)
        if self.moment.fits(plan_of(made), self.situation):
            return made
        refused: BudgetError | None = None
        closely = replace(self.moment, closely=True)
        for situation in self._further(plan_of(made)):
            if not self.moment.closely and not known(situation):
                return replace(self, moment=closely).fitting(make, plan_of, known)
            try:
                made = make(situation)
            except BudgetError as error:
                refused = error
                continue
            if self.moment.fits(plan_of(made), situation):
                return made
        try:
            if refused is None or closely.may_fit(plan_of(made)):
                return made
            if self.moment.closely:
                raise refused
        finally:
            refused = None  # its traceback holds this frame, and with it the caller's tensors
        return replace(self, moment=closely).fitting(make, plan_of, known)

    def _further(self, plan: Plan) -> Iterator[Situation]:
        """The situations to plan for where the first plan does not fit: as one of several equal forwards, then beside
        those that are there; with bytes elsewhere as the plan has them, rounded up, and exactly."""
        now = self.moment.elsewhere_bytes(plan)
        there = None if now == plan.account.elsewhere else now
        rounded = there and in_steps(there, plan.budget_bytes)
        group = self.moment.in_group
        for elsewhere in dict.fromkeys((rounded, there)):
            if group is not None:
                among = replace(self.situation, other_forwards=group.other_forwards, to_come=group.to_come)
                yield replace(among, elsewhere=elsewhere)
            yield replace(self.crowded, elsewhere=elsewhere)

    def begin(self, plan: Plan, exchanges: int = 0) -> PendingForward:
        """Register the forward that begins now and runs by the plan, with these collectives (`Emitted.exchanges`)."""
        return self.begin_forward(plan, self.situation, exchanges)

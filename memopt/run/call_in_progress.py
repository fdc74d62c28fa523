"""A training call that is running, and the choice of its plan: the first of several that fits together with everything
else on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from memopt.account.elsewhere import in_steps
from memopt.capture.inputs import Call
from memopt.compat.modules import Parts
from memopt.errors import BudgetError, without_frames
from memopt.planning.plan import Plan
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.terms import Situation
from memopt.run.executable import Executable
from memopt.run.ledger import Moment
from memopt.run.pending import PendingForward


@dataclass(frozen=True, eq=False)
class CallInProgress:
    """A training call that is running, with its situation."""

    call: Call
    situation: Situation
    """The situation of the call, without the forwards that wait and the bytes elsewhere, which `moment` has."""
    moment: Moment
    """The forwards that wait for their backward, and the bytes elsewhere, on the device."""
    parts: Parts
    """The model's modules and tensors when the call began."""
    begin_forward: Callable[[CallInProgress, Plan, int], PendingForward]
    most_between: Callable[[], float] = lambda: math.inf
    """Returns the bytes that code between the regions of a forward may hold while it is recorded."""
    may_end: bool = False
    """Whether a forward that runs more operators than were counted may be ended by `LongerPath`, and begun again."""

    @property
    def closely(self) -> CallInProgress:
        """The same call with `Moment.closely`: the device is searched for other tensors however long that takes."""
        return replace(self, moment=replace(self.moment, closely=True))

    def fitting(
        self, make: Callable[[Situation, bool], Executable], known: Callable[[], Mapping[Situation, Executable]]
    ) -> Executable:
        """The first plan, ready to run, that fits on the device now: several situations are tried in turn, which differ
        in the bytes that other tensors are taken to hold. `make` plans a situation, and raises `BudgetError` where no
        plan of it fits the budget; if its second argument is True, the error says what would help.

        `known` returns the existing plans for the sizes of the call. A fitting one is used although it was made for
        another situation, so that small changes on the device cause no new plan. Before a new one is made, the device
        is searched for other tensors. Where none fits, the last plan made is returned in two cases: `make` raised no
        error for any situation; or the plan fits if the backwards of forwards that are still to come run before the
        backward of this call (`Moment.may_fit`). Otherwise `BudgetError` is raised."""
        made = make(self.situation, True)
        if self.moment.fits(made.plan, self.situation):
            return made
        plans = {other: planned for other, planned in known().items() if other.alone == self.situation.alone}
        for other, planned in sorted(plans.items(), key=_about_fastest):
            if self.moment.still_fits(planned.plan, other):
                return planned
        refused: Situation | None = None
        for situation in self._further(made.plan):
            if not self.moment.closely and situation not in plans:
                return self.closely.fitting(make, known)
            try:
                made = self._made(make, situation)
            except BudgetError as error:
                without_frames(error)  # they hold the caller's tensors
                refused = situation
                continue
            if self.moment.fits(made.plan, situation):
                return made
        if refused is None or self.moment.may_fit(made.plan) or self.closely.moment.may_fit(made.plan):
            return made
        return make(refused, True) if self.moment.closely else self.closely.fitting(make, known)

    def _made(self, make: Callable[[Situation, bool], Executable], situation: Situation) -> Executable:
        """Calls `make`. While the caller keeps the outputs of the step before, as it will in each step, a refusal is
        stored, and raised again without a search."""
        if not self.moment.kept_outputs:
            return make(situation, False)
        refusals = self.moment.entry.refusals
        key = situation, tuple([tensor.shape for tensor in self.moment.inputs])
        if (known := refusals.get(key)) is not None:
            raise known.adding()
        try:
            return make(situation, False)
        except BudgetError as refused:
            refusals[key] = refused.adding()
            raise

    def _further(self, plan: Plan) -> Iterator[Situation]:
        """The situations to try, in order, where the first plan does not fit: first those in which outputs of the step
        before count as elsewhere, if the caller still holds some; then the bytes elsewhere now, rounded up coarsely,
        rounded up finely, and exact (rounding makes one plan serve after small changes). Each is tried with this call
        as one of a group of equal forwards, if more are expected, and then with the forwards that wait now. The last
        one leaves room for the backward of a plain forward that waits, or else holds as little as possible."""
        now = self.moment.elsewhere_beside(plan.account)
        there = None if now == plan.account.elsewhere else now
        rounded = there and in_steps(there, plan.budget_bytes)
        fine = max(1, self.moment.entry.notable_bytes // 2)
        closer = there and rounded and min(rounded, -(-there // fine) * fine)
        own = self.moment.beside_callers_code(self.situation, plan)
        group = self.moment.in_group(own)
        others = self.moment.others_in_backward(self.situation.gradients_held)
        kept = self.moment.kept_outputs
        with_kept = (in_steps(now + kept, plan.budget_bytes),) if kept else ()
        for elsewhere in dict.fromkeys((*with_kept, rounded, closer, there)):
            if group is not None:
                yield replace(group, elsewhere=elsewhere)
            yield replace(own, other_forwards=others, elsewhere=elsewhere)
        if (spared := self.moment.plain_backward_bytes) or kept:
            yield replace(own, other_forwards=others, elsewhere=rounded, for_other_models=spared or None)

    def begin(self, plan: Plan, exchanges: int = 0) -> PendingForward:
        """Register the forward that now begins to run by `plan`. `exchanges` identifies its collectives
        (`Emitted.exchanges`)."""
        return self.begin_forward(self, plan, exchanges)


def _about_fastest(planned: tuple[Situation, Executable]) -> tuple[int, int]:
    """A sort key: plans with less added time first; of about equally fast ones, those that leave the most room for
    other tensors."""
    plan = planned[1].plan
    return round(plan.added_time / NEGLIGIBLE), -plan.account.elsewhere - plan.account.other_forwards

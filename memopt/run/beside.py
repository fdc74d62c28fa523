"""The bytes on the device beside a training call, and whether a plan leaves room for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from memopt.account.elsewhere import Around, Elsewhere
from memopt.planning.plan import Plan
from memopt.planning.planner import LITTLE
from memopt.planning.situation import Situation

_WORTHWHILE = 16
"""Room that has become free is planned for where it is at least this part of the budget."""
_MORE_STATE = 2
"""An optimiser that nobody has looked at may hold this many times the state of its class's defaults beside that: for
`amsgrad`, and the temporaries of `foreach`."""
_REMEMBERED = 16
"""The number of groups of forwards whose size is remembered."""


class Groups:
    """How many forwards of a model run before its first backward, as seen so far.

    A group begins with a forward while none waits for its backward.
    """

    def __init__(self, at_least: int = 1) -> None:
        self.others = at_least - 1
        """The number of further forwards that the present group is expected to have after its first."""
        self._at_least, self._size = at_least, 0
        self._sizes: deque[int] = deque(maxlen=_REMEMBERED)
        self._held: int | None = None

    def begin(self, waiting: int) -> None:
        """Count a forward that begins while `waiting` others wait for their backward."""
        if waiting:
            self._size = max(self._size, waiting + 1)
        else:
            self._sizes.append(self._size)
            self._size = 1
            self.others = max(self._at_least, *self._sizes) - 1

    def ran(self, waiting: int, held_bytes: int) -> None:
        """Note the bytes that a forward holds which began while `waiting` others waited."""
        if waiting:
            self._held = held_bytes

    def held_after(self, plan: Plan) -> int:
        """The bytes that each further forward is expected to hold, after one that runs by this plan."""
        return plan.held_bytes if self._held is None else self._held


@dataclass(frozen=True, eq=False)
class Beside:
    """The bytes that the device holds beside a training call that begins now, or beside its backward."""

    waiting: int = 0
    """The number of forwards of this model that wait for their backward, with plan or without."""
    waiting_bytes: int = 0
    """The bytes that they hold."""
    gradients: int = 0
    """Bytes of the gradients that the backward of another forward leaves."""
    groups: Groups = field(default_factory=Groups)
    elsewhere: Elsewhere | None = None
    around: Around = field(default_factory=Around)
    later_bytes: int = 0
    """Bytes elsewhere that appeared between an earlier forward and its backward."""
    spare_bytes: int | None = None
    """The bytes that this call may hold beside the backwards of those that wait; None where none waits."""

    @property
    def to_come(self) -> int:
        """The number of forwards that are expected to follow before the first backward."""
        return max(0, self.groups.others - self.waiting)

    @property
    def in_group(self) -> Situation | None:
        """The situation of one of several forwards that hold as much as each other; None where none is expected."""
        if not self.groups.others:
            return None
        return Situation(other_forwards=self.gradients, to_come=max(self.groups.others, self.waiting))

    def fits(self, plan: Plan, situation: Situation) -> bool:
        """Whether a plan that was made for a situation leaves room for all that is here, and that is to come."""
        account, others = plan.account, self.waiting_bytes
        if situation.to_come:
            others += self.to_come * plan.held_bytes + self.gradients
        elif self.to_come:
            others += self.to_come * self.groups.held_after(plan) + self.gradients
        if situation.elsewhere is None and self._has_shrunk(plan):
            return False
        alone = plan.ceiling_bytes - account.other_forwards - account.elsewhere
        return self.elsewhere_within(plan, plan.budget_bytes - alone - others)

    def _has_shrunk(self, plan: Plan) -> bool:
        """Whether a plan that costs time was made beside far more bytes elsewhere than there are now."""
        enough = plan.budget_bytes // _WORTHWHILE
        if self.elsewhere is None or plan.added_time <= LITTLE or plan.account.elsewhere < enough:
            return False
        about = self.elsewhere.about(self.around)
        return plan.account.elsewhere - about - self.later_bytes >= enough

    def may_fit(self, plan: Plan) -> bool:
        """Whether a plan leaves room for all that is here, and for forwards to come that are done before its
        backward."""
        account = plan.account
        others = self.waiting_bytes + (self.gradients if self.to_come else 0)
        alone = plan.ceiling_bytes - account.other_forwards - account.elsewhere
        return self.elsewhere_within(plan, plan.budget_bytes - alone - others)

    def elsewhere_within(self, plan: Plan, room_bytes: int) -> bool:
        """Whether the bytes elsewhere on the device, beside a step by a plan, are at most `room_bytes`."""
        if self._surely_within(room_bytes, plan.account.optimizer_state):
            return True
        return self.elsewhere_bytes(plan) <= room_bytes

    def may_hold(self, held_bytes: int) -> bool:
        """Whether the waiting forwards have room for their backwards beside a call that holds `held_bytes`."""
        return self.spare_bytes is None or held_bytes <= self.spare_bytes

    def reserved_bytes(self, held_bytes: int) -> int:
        """The bytes that a step has to leave where it runs without a plan and holds `held_bytes` until its backward:
        for forwards that wait, for those to come that hold as much as this one, and for the gradients that the first
        of their backwards leaves."""
        company = self.waiting or self.to_come
        return self.waiting_bytes + self.to_come * held_bytes + (self.gradients if company else 0)

    def leaves(self, room_bytes: int, optimizer_state: int) -> bool:
        """Whether the bytes elsewhere on the device, beside a step with an optimiser state of that size, are at most
        `room_bytes`."""
        if self.elsewhere is None or self._surely_within(room_bytes, optimizer_state):
            return room_bytes >= 0
        return self.elsewhere.now(self.around).beside(optimizer_state) + self.later_bytes <= room_bytes

    def _surely_within(self, room_bytes: int, optimizer_state: int) -> bool:
        """Whether a bound that is known at once says that the bytes elsewhere are at most `room_bytes`."""
        if self.elsewhere is None:
            return False
        if not self.elsewhere.has_looked:  # the optimiser may have options by which it holds more than by default
            room_bytes -= _MORE_STATE * optimizer_state
        most = self.elsewhere.at_most(self.around, room_bytes - self.later_bytes)
        return most is not None and most.beside(optimizer_state) + self.later_bytes <= room_bytes

    def elsewhere_bytes(self, plan: Plan) -> int:
        """The bytes elsewhere on the device now, beside a step by a plan."""
        if self.elsewhere is None:
            return plan.account.elsewhere
        return self.elsewhere.now(self.around).beside(plan.account.optimizer_state) + self.later_bytes

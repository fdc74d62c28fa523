"""The memory on the device around the training calls of one model: forwards that wait for their backward, and all that
is no part of its steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from memopt.account.account import distinct_bytes
from memopt.account.elsewhere import Around
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.autograd import with_hooks
from memopt.compat.modules import Parts, modules_of, parameters_in
from memopt.compat.storages import weak_storages
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.emit.stepping import sharing_memory
from memopt.errors import BudgetError
from memopt.planning.call_planner import CallPlanner
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.run.beside import Beside, Groups
from memopt.run.data_parallel import DataParallel
from memopt.run.pending import PendingForward, PendingForwards, PlainForward, let_go_of_all
from memopt.training_state import CallState
from memopt.units import size


class Surroundings:
    """The memory around the training calls of one model. The planner learns from it which memory belongs to a call.

    Args:
        forwards: the number of forwards that are expected before a backward, at least.
        one_by_one: whether each backward is that of a single forward. Then all of them run by one plan, which adds
            gradients in place and leaves room for the others from the first to the last.
    """

    def __init__(
        self, model: nn.Module, planner: CallPlanner, parallel: DataParallel, forwards: int, *, one_by_one: bool = False
    ) -> None:
        self.model, self.planner, self.parallel, self.one_by_one = model, planner, parallel, one_by_one
        self.pending = PendingForwards()
        self.groups = Groups(forwards)
        planner.around = self.around

    @property
    def waiting(self) -> int:
        """The number of forwards that wait for their backward, with plan or without."""
        return len(self.pending.waiting()) + len(self.pending.plain_waiting())

    def begin(self, call: Call) -> int:
        """Note that a forward begins; returns the number of those that wait for their backward.

        Raises `BudgetError` where one of them has no room for the gradients that the backward of this one will leave.
        """
        let_go_of_all()
        waiting = self.waiting
        self.groups.begin(waiting)
        if waiting:
            self._check_planned()
            self._check_plain(call, self._gradients())
        return waiting

    def situation(self, parts: Parts | None = None) -> Situation:
        """The situation of a call that begins now, without the forwards that wait. `parts` are the model's, where the
        caller has them at hand."""
        parameters = (parts or Parts.of(self.model)).parameters
        proposing = self.planner.proposing
        stepped = proposing.stepping is not None
        hooked = [parameter for parameter in with_hooks(parameters) if is_hooked(parameter, stepped=stepped)]
        if stepped or proposing.may_step_in_backward:
            hooked += sharing_memory(self.model)
        return Situation(
            gradients_held=self.one_by_one or _have_gradients(parameters),
            to_come=self.groups.others if self.one_by_one else 0,
            hooked=frozenset(map(id, hooked)),
            buckets=self.parallel.buckets(),
        )

    def beside(self, call: Call, situation: Situation) -> Beside:
        """The bytes that the device holds beside a call that begins now."""
        waiting = self.waiting
        gradients = 0
        if (waiting or self.groups.others) and not self.one_by_one:
            gradients = 2 * self._gradients() if situation.gradients_held else self._gradients()
        return Beside(
            waiting,
            self.pending.held_bytes,
            gradients,
            self.groups,
            self.planner.elsewhere,
            self.around(call, situation.gradients_held),
            self.pending.later_bytes,
            self._spare_bytes(call),
        )

    def around(self, call: Call, *kind: object) -> Around:
        """The memory that belongs to a call that begins now: its inputs, the copies by which it can be undone, waiting
        forwards, and what they returned."""
        bucket_bytes, buckets = self.parallel.bucket_memory()
        return Around(
            tuple(tensors_in(call)),
            self.pending.addresses,
            self.pending.held_bytes,
            self.pending.others_held_bytes,
            (self.waiting, len(self.pending.of_other_models()), *kind),
            bucket_bytes,
            buckets,
            partial(CallState.copies_of, self.model),
        )

    def around_backward(self, forward: PendingForward, gradients: Sequence[object]) -> Beside:
        """The bytes that the device holds beside the backward of a forward, which begins with these gradients."""
        self.parallel.note_buckets()
        around = self.around(((), {}), forward.plan.account.gradients_held, "backward")
        present = self._present({forward, *self.pending.waiting()}, gradients)

        def addresses() -> frozenset[int]:
            return self.pending.addresses() | frozenset(present)

        held = sum(present.values()) + self.pending.plain_held_bytes
        around = replace(around, addresses=addresses, waiting_bytes=held)
        return Beside(elsewhere=self.planner.elsewhere, around=around)

    def _present(self, forwards: Iterable[PendingForward], gradients: Iterable[object]) -> dict[int, int]:
        """The bytes on the device, by address, of what forwards were given, hold and returned, and of the gradients
        with which a backward begins; without parameters and buffers."""
        own = {storage.address for storage in weak_storages([*self.model.parameters(), *self.model.buffers()])}
        found = [*(storage for forward in forwards for storage in forward.present()), *weak_storages(gradients)]
        device = self.planner.elsewhere.device
        here = {storage.address: storage.nbytes for storage in found if storage.device == device}
        return {address: nbytes for address, nbytes in here.items() if address and address not in own}

    def planned(self, call: Call, situation: Situation, plan: Plan, accumulation: Accumulation) -> PendingForward:
        """Register a forward that begins now and runs by a plan.

        Raises `BudgetError` where the backward of a plain call that waits has no room beside what it holds.
        """
        held = plan.held_bytes
        self._check_plain(call, held)
        self.groups.ran(self.waiting, held)
        forward = PendingForward(
            plan,
            weakref.ref(self.model),
            situation.hooked,
            self.pending,
            accumulation,
            held,
            self.around_backward,
            tuple(weak_storages(tensors_in(call))),
        )
        self.pending.add(forward)
        return forward

    def explain(self, refused: BudgetError, waiting: int) -> BudgetError:
        """The refusal of a call that began while others waited; it says so if that was not planned for."""
        return refused if self.groups.others >= waiting else refused.adding(_IN_GROUP.format(waiting + 1))

    def _gradients(self) -> int:
        return distinct_bytes(parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def _check_planned(self) -> None:
        """Raise `BudgetError` where a planned forward that waits has no room for the gradients of another one."""
        gradients = 0 if self.one_by_one else self._gradients()
        earlier_bytes = 0
        for forward in self.pending.waiting():
            planned = forward.plan
            alone = planned.ceiling_bytes - planned.account.other_forwards
            needed = alone + earlier_bytes + gradients
            if needed > planned.budget_bytes:
                elsewhere = planned.account.elsewhere
                raise self._refusal(planned.budget_bytes, forward.roomy_bytes(needed), elsewhere)
            earlier_bytes += forward.held_bytes

    def _check_plain(self, call: Call, more_bytes: int) -> None:
        """Raise `BudgetError` where a plain call that waits has no room for `more_bytes` in its backward, beside a call
        that begins now."""
        for forward in self.pending.plain_waiting():
            others = self.pending.held_bytes - forward.held_bytes
            if (lacking := others + more_bytes - self._left_bytes(forward, call)) > 0:
                budget = self.planner.options.budget_bytes
                raise self._refusal(budget, budget + lacking + forward.held_bytes, 0)

    def _left_bytes(self, forward: PlainForward, call: Call) -> int:
        """The bytes that the step of a plain call leaves of the budget, beside what lies elsewhere while another call
        begins, if it were the only forward that waits."""
        held = _have_gradients(parameters_in(modules_of(self.model)))
        elsewhere = self.planner.elsewhere.now(self.around(call, held))
        return forward.room_bytes - self.pending.later_bytes - elsewhere.beside(forward.optimizer_state)

    def _spare_bytes(self, call: Call) -> int | None:
        """The bytes that a further forward may hold beside the backward of each that waits; None where none waits."""
        plain = [self._left_bytes(forward, call) + forward.held_bytes for forward in self.pending.plain_waiting()]
        plans = [(forward.plan, forward.held_bytes) for forward in self.pending.waiting()]
        planned = [
            plan.budget_bytes - plan.ceiling_bytes + plan.account.other_forwards + held for plan, held in plans
        ]  # fmt: skip
        return min(plain + planned) - self.pending.held_bytes if plain or planned else None

    def _refusal(self, budget_bytes: int, roomy_bytes: int, elsewhere: int) -> BudgetError:
        reason = "a second forward before the first one's backward"
        if elsewhere:
            reason += f", elsewhere {size(elsewhere)}"
        further = (_IN_GROUP.format(self.waiting + 1),)
        return BudgetError(budget_bytes, roomy_bytes, reason, least=False, further=further)


def _have_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.grad is not None for parameter in parameters)


_IN_GROUP = (
    "the first one was planned by itself; from the next step on {0} forwards before a backward are planned for, and "
    "from the first step on if optimize is given forwards={0}"
)

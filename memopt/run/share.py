"""One optimised model's part in the ledger of its device: what is counted for it at each moment of its training."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn

from memopt.account.account import BOOKKEEPING_BYTES, distinct_bytes
from memopt.account.elsewhere import Elsewhere, in_steps
from memopt.capture.data_sizes import is_real
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.fsdp import is_fully_sharded
from memopt.compat.hooks import with_hooks
from memopt.compat.modules import Parts, buffers_in, modules_of, parameters_in
from memopt.compat.operators import tree_leaves
from memopt.compat.tensors import as_implemented, bytes_by_address, bytes_still_there, weak_storages
from memopt.emit.emit import sharing_memory
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.errors import BudgetError
from memopt.lru import LruCache
from memopt.planning.call_accounts import OptimizerChoice
from memopt.planning.derived import StepBytes, tangent_bytes
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.changed_inputs import watch_plain
from memopt.run.entry import Entry, WaitingPlain
from memopt.run.ledger import Ledger, Moment
from memopt.run.pending import PendingForward, release_all
from memopt.run.ranks import DataParallel
from memopt.run.seen import AsPlain, ForwardGroups, Overlap, room_for_others
from memopt.run.until_backward import LARGE_LOSS_OUTSIDE, LOSS_OUTSIDE, UntilBackward
from memopt.units import size


class Share:
    """One optimised model's access to the `Ledger` of its device, to report and to read: the ledger counts the bytes
    outside of the steps of all optimised models.

    With `Options.one_by_one` each backward is that of a single forward, even while several wait. All forwards then run
    by one plan, which adds gradients in place and leaves room for the other forwards."""

    def __init__(self, model: nn.Module, options: Options, parallel: DataParallel) -> None:
        self.model, self.parallel, self.one_by_one = model, parallel, options.one_by_one
        here = options.hardware is None and all(map(is_real, model.parameters()))
        # The parameters that fully_shard gathers and frees between regions would also be found elsewhere.
        looked_for = here and not is_fully_sharded(model)
        fixed_bytes = options.elsewhere_bytes if looked_for or options.elsewhere_bytes is not None else 0
        groups = ForwardGroups(options.forwards)
        self.entry = Entry(model, options.budget_bytes, fixed_bytes, options.given_optimizer, groups)
        self._left: LruCache[object, int] = LruCache(_MOST_KINDS)
        """The bytes that were left to other models, at the latest moment of each kind."""
        self._freed = False
        """Whether the warning was given that forwards run a second time."""
        self._others_there: int | None = None
        """The most bytes of parameters of models that are not optimised on the device at earlier calls; None before."""

    @property
    def ledger(self) -> Ledger:
        """The ledger of the device that the model is on."""
        return Ledger.of(self.entry)

    @property
    def fixed_bytes(self) -> int | None:
        """The bytes that the user gave as `elsewhere_gb`, or 0 for a plan for another device; None where the device is
        searched for them."""
        return self.entry.fixed_bytes

    @property
    def found(self) -> Elsewhere:
        """The bytes on the device that do not belong to the step, by kind, as the latest search through Python's
        objects found them."""
        return self.entry.found

    @property
    def tolerance_bytes(self) -> int:
        """The bytes that plans leave free for tensors that appear without being noticed; 0 where the device is not
        searched."""
        return self.entry.tolerance_bytes if self.entry.found.looked else 0

    @property
    def gradients_may_stay(self) -> bool:
        """Whether parameters may still hold gradients when a later forward begins. False once a forward after a
        backward has begun without any, and none has begun with some."""
        return self.entry.gradients_stay is not False

    @property
    def keeps_graph(self) -> bool:
        """Whether a backward of the model was seen to keep its graph (`retain_graph=True`)."""
        return self.entry.graph.kept

    def until_backward(self, tangent_bytes: int) -> tuple[int, int]:
        """The bytes that the caller's own code, such as a loss function, allocates between a forward and its backward;
        and how many more it may need, where the first figure is a guess, else 0. `tangent_bytes` is the size of the
        gradients that the backward begins with."""
        if (seen := self.entry.until_backward(tangent_bytes)) is not None:
            return seen, 0
        if not self.entry.found.looked:
            return 0, 0
        return LOSS_OUTSIDE * tangent_bytes, (LARGE_LOSS_OUTSIDE - LOSS_OUTSIDE) * tangent_bytes

    @property
    def note(self) -> str:
        """A sentence for plans and errors on the bytes elsewhere on the device; empty if they are few."""
        found = self.entry.found
        if not found.largest or found.other <= max(BOOKKEEPING_BYTES, self.entry.notable_bytes):
            return ""
        return (
            f"{size(found.other)} on the device are no part of this step (the largest: {', '.join(found.largest)}); "
            "free them to leave the next step more room, or give elsewhere_gb=0 to leave them out of the budget"
        )

    def join(self) -> None:
        """Make other models' plans leave room for this model's steps."""
        self.entry.optimised = True
        if self.ledger.others_training(self.entry):
            gc.collect()  # frees models that are no longer used

    def leave(self) -> None:
        """Make other models' plans treat this model as one that is not optimised."""
        self.entry.optimised = False

    def look(self, call: Call) -> Elsewhere:
        """Search the device for tensors outside of a call that begins now. The bytes found include those that other
        optimised models will hold."""
        counted = self._counted(call)
        found = counted.ledger.look_before_planning(counted)
        return replace(found, other=found.other + counted.lasting_bytes)

    def held_still(self, call: Call) -> AbstractContextManager[None]:
        """A context in which steps of `call` are checked: new allocations, which are copies made for the check, are not
        counted as bytes elsewhere on the device."""
        counted = self._counted(call)
        return counted.ledger.held_still(counted)

    def latest_elsewhere(self, call: Call) -> int:
        """The bytes that tensors of other code held on the device at the latest search before a call with the same
        number of waiting forwards, less what was freed after that search; or what the user gave as `elsewhere_gb`. The
        device is not searched."""
        counted = self._counted(call)
        return counted.ledger.latest_elsewhere(counted)

    def begin(self) -> int:
        """Record that a forward begins; returns the number of others that wait for their backward."""
        release_all()
        UntilBackward.drop()
        for forward in [one for entry in Ledger.of(self.entry).entries for one in entry.plain if one.freed]:
            forward.entry.plain.discard(forward)  # a backward that did not begin at its outputs has freed its graph
        waiting = len(self.entry.all_waiting())
        self.entry.begin(waiting)
        return waiting

    def free_waiting(self) -> bool:
        """Make waiting forwards, of this model or else of other optimised ones, free what they saved and compute it
        again in their backward; returns whether any does."""
        return bool(self._free((self.entry,)) or self.free_others())

    def free_others(self) -> int:
        """Make waiting forwards of other optimised models free what they saved and compute it again in their backward;
        returns the bytes freed."""
        return self._free([one for one in self.ledger.entries if one is not self.entry])

    def _free(self, entries: Iterable[Entry]) -> int:
        freed = sum([forward.free_saved() for entry in entries for forward in entry.all_waiting()])
        if freed and not self._freed:
            self._freed = True
            warnings.warn(
                f"{type(self.model).__name__} is called while other forwards wait for their backward, and the budget "
                "has no room for what all of them save: earlier ones run a second time in the backward; a larger "
                "budget saves that time",
                stacklevel=2,
            )
        return freed

    def returned(self, call: Call, result: Any, plan: Plan | None) -> None:
        """Record that the forward of a call returns `result` to the caller, whose code runs until the backward. `plan`
        is the plan by which it ran, if any."""
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self.entry.latest is None:
            watch_plain(self.entry, call, tensors)
        if self.entry.fixed_bytes is None and self.parallel.wrapper is None:
            ledger = Ledger.of(self.entry)
            with as_implemented():
                differentiated = [tensor for tensor in tensors if tensor.grad_fn is not None]
                outputs_bytes = distinct_bytes([tensor for tensor in differentiated if tensor.dim()])
                more = outputs_bytes > self.entry.callers_code.returned_bytes or self.entry.given_bytes is None
                others, before = self._parameters_of_others(ledger), self._others_there or 0
                more, self._others_there = more or others > before + self.entry.notable_bytes, max(before, others)
                if differentiated and (more or ledger.may_look()):
                    begins_with = self.entry.figure("tangent", plan, lambda: tangent_bytes(plan)) if plan else 0
                    UntilBackward.begin(self.entry, differentiated, tensors_in(call), begins_with)

    def situation(self, optimizer_choice: OptimizerChoice, parts: Parts | None = None) -> Situation:
        """The situation of a call that begins now, without the forwards that wait. `optimizer_choice` has the chosen
        levers on the optimizer, `parts` the model's modules and tensors, if the caller has them already."""
        parameters = (parts or Parts.of(self.model)).parameters
        held, stepped = _have_gradients(parameters), optimizer_choice.stepping is not None
        if self.entry.trained:
            self.entry.gradients_stay = held or bool(self.entry.gradients_stay)
        hooked = [parameter for parameter in with_hooks(parameters) if is_hooked(parameter, stepped=stepped)]
        if stepped or optimizer_choice.may_step_in_backward:
            hooked += sharing_memory(self.model)
        return Situation(
            gradients_held=self.one_by_one or held,
            to_come=self.entry.groups.others_expected if self.one_by_one else 0,
            meanwhile=0 if self.entry.fixed_bytes is not None else None,
            hooked=frozenset(map(id, hooked)),
            buckets=self.parallel.buckets(),
        )

    def moment(self, call: Call, situation: Situation) -> Moment:
        """The moment at which a call begins: which bytes on the device are counted already, in the step or in other
        forwards."""
        counted, gradients = self._counted(call, situation.gradients_held), 0
        if (counted.waiting or self.entry.groups.others_expected) and not self.one_by_one:
            gradients = self.entry.trainable_bytes * (2 if situation.gradients_held else 1)
        counted = replace(counted, gradients=gradients)
        later = self._left_later(counted)
        spare = self._spare_bytes(call) if counted.waiting else None
        searched, device = self.entry.fixed_bytes is None, counted.ledger.device
        kept = self.entry.kept_outputs(counted.inputs, device) if searched else 0
        return replace(counted, appears=True, later_bytes=later, spare_bytes=spare, kept_outputs=kept)

    def others_may_run(self, moment: Moment) -> bool:
        """Whether forwards of other models may run before the backward of this one, though none was seen to. Until the
        model's first backward: if there are models on the device that are not optimised. Later: if other optimised
        models train and fewer than two steps of this one are over (a discriminator after the generator's step), or if
        models that are not optimised have more parameters on the device than before, such as a new teacher that is a
        copy of this model."""
        if self.entry.fixed_bytes is not None:
            return False
        if self.entry.trained and self.entry.groups.done < 2 and moment.others_train:
            return True
        moment.ledger.now(replace(moment, closely=True) if self._others_there is None else moment)
        before = self._others_there if self.entry.trained else None
        return self._parameters_of_others(moment.ledger) > (before or 0) + self.entry.notable_bytes

    def _parameters_of_others(self, ledger: Ledger) -> int:
        """The bytes of parameters of models that are not optimised, as the latest search of the device found them."""
        if not (found := self.entry.found.parameters):
            return 0
        optimised = [one.model.parameters() for one in ledger.others_training(self.entry)]
        return max(0, found - distinct_bytes(parameter for parameters in optimised for parameter in parameters))

    def for_other_models(self, moment: Moment) -> int | None:
        """The bytes to leave free for steps of other models between the forward of a call and its backward. None where
        it is not known yet what other models need, or how many forwards of this model wait at once. Before the first
        backward, any model on the device may run in between, as a teacher does."""
        entry, ledger = self.entry, moment.ledger
        if self.others_may_run(moment):
            return None
        others = ledger.others_training(entry)
        if (others and not ledger.knows(entry)) or moment.waiting > entry.groups.others_expected:
            return None
        if not others:
            return 0
        seen = [overlap for overlap in entry.overlaps if not overlap.begun_before]
        intervening = ledger.intervening_backward_bytes(entry)
        if not seen or (needs := entry.step_bytes) is None:
            return intervening
        return max(intervening, self._shared("meanwhile", moment, seen, needs, needs.least_held, needs.held))

    def _left_later(self, moment: Moment) -> int:
        """The bytes to leave for forwards of other models that will exist during the backward."""
        seen = [overlap for overlap in self.entry.seen_later if overlap.waiting]
        if not seen or (needs := self.entry.step_bytes) is None:
            return 0
        # Further forwards of this model are to wait beside them.
        least = needs.least_peak + moment.to_come * needs.least_held + moment.gradients
        most = needs.peak + moment.to_come * needs.held + moment.gradients
        return self._shared("backward", moment, seen, needs, least, most)

    def _shared(
        self, when: str, moment: Moment, seen: Iterable[Overlap], needs: StepBytes, own_least: int, own_most: int
    ) -> int:
        """The bytes of the room in the budget that are left for the forwards of other models in `seen`, rounded up.
        `own_least` and `own_most` are the bytes that this model needs by the plan that holds least, and with nothing
        recomputed. The earlier result for the same `when` and kind of moment is returned while it is about right, so
        that small changes need no new plans."""
        budget = self.entry.budget_bytes
        elsewhere = moment.ledger.latest_elsewhere(moment) + moment.lasting_bytes + moment.waiting_bytes
        room = budget - needs.lasting - elsewhere
        found, before = room_for_others(seen, own_least, own_most, room), self._left.get((when, moment.kind))
        if before is None or not found <= before <= found + budget // _ABOUT:
            before = min(in_steps(found, budget), max(found, room - own_least))
            self._left[when, moment.kind] = before
        return before

    def _counted(self, call: Call, *kind: object) -> Moment:
        """The moment at which a call begins, with the bytes that are counted already: its inputs, the copies by which
        it can be undone, and what waiting forwards hold and returned. `kind` has further parts of `Moment.kind`."""
        ledger, own = Ledger.of(self.entry), self.entry.waiting()
        waiting = [*own, *self.entry.plain]
        others = [other for other in ledger.entries if other is not self.entry]
        theirs = [one for other in others for one in other.waiting()]
        bucket_bytes, buckets = self.parallel.bucket_memory()
        lasting, now = ledger.lasting(self.entry)
        return Moment(
            self.entry,
            ledger,
            (len(waiting), len(theirs), *kind),
            tuple(tensors_in(call)),
            len(waiting),
            sum(map(_HELD, waiting)),
            sum(map(_HELD, others)),
            lasting,
            sum(map(attrgetter("nbytes"), now)),
            addresses=lambda: ledger.addresses(self.entry),
            bucket_bytes=bucket_bytes,
            buckets=buckets,
            hidden_bytes=sum(map(methodcaller("hidden_bytes"), (*own, *theirs))),
        )

    def backward_moment(self, forward: PendingForward, gradients: Sequence[object]) -> Moment:
        """The moment at which the backward of a forward begins: which bytes on the device are counted already, in the
        step or in other forwards. `gradients` are those of the outputs, with which the backward begins."""
        self.parallel.note_buckets()
        counted = self._counted(((), {}), forward.plan.account.gradients_held, "backward")
        waiting = [one for one in self.entry.waiting() if isinstance(one, PendingForward)]
        present = self._present({forward, *waiting}, gradients, counted.ledger.device)

        def addresses() -> frozenset[int]:
            return counted.addresses() | frozenset(present)

        held = sum(present.values()) + self.entry.plain_held_bytes
        return replace(counted, addresses=addresses, waiting_bytes=held)

    def _present(
        self, forwards: Iterable[PendingForward], gradients: Iterable[object], device: torch.device
    ) -> dict[int, int]:
        """The bytes on a device, by address, of the inputs, saved tensors and outputs of forwards, and of the
        gradients with which a backward begins; without parameters and buffers."""
        modules = modules_of(self.model)
        own = {id(one): one for one in (*parameters_in(modules), *buffers_in(modules))}
        values, noted = list(gradients), dict[int, int]()
        for forward in forwards:
            values += forward.held()
            noted |= bytes_still_there([one for one in (*forward.given, *forward.outputs) if one.device == device])
        here = bytes_by_address([one for one in values if id(one) not in own], device) | noted
        lying = bytes_by_address(own.values(), device)
        return {address: nbytes for address, nbytes in here.items() if address and address not in lying}

    def planned(self, now: CallInProgress, plan: Plan, accumulation: Accumulation) -> PendingForward:
        """Register the forward of a call that runs by a plan; `accumulation` says how its backward adds gradients.

        Raises `BudgetError` where a waiting forward would then have too little room for its backward. What takes the
        room are the gradients that the new forward's backward leaves; for a waiting plain forward, also what the new
        forward holds."""
        held, waiting, lacking = plan.held_bytes, len(self.entry.all_waiting()), 0
        if waiting:
            wanted = max(held if self.entry.plain_waiting() else 0, self._gradients_left())
            lacking = wanted - self._room_beside(now.call)
        there = replace(self._counted(now.call), closely=True).elsewhere_beside(plan.account) if lacking > 0 else 0
        if lacking > 0 and lacking > self.entry.state_to_come(plan, self.entry.held_bytes, there):
            alone = plan.smallest_bytes() - plan.account.other_forwards
            works = max(alone + self.entry.held_bytes, self.entry.budget_bytes + lacking + self.entry.notable_bytes)
            elsewhere = f", elsewhere {size(plan.account.elsewhere)}" if plan.account.elsewhere else ""
            reason = f"a second forward before the first one's backward{elsewhere}"
            raise BudgetError(self.entry.budget_bytes, works, reason, least=False)
        if waiting and now.situation.for_other_models is not None:
            self.entry.groups.beside_waiting = held, max(one.held_bytes for one in self.entry.all_waiting())
        forward = PendingForward(
            now.situation.hooked,
            accumulation,
            self.backward_moment,
            entry=self.entry,
            plan=plan,
            account=plan.account,
            held_bytes=held,
            given=tuple(weak_storages(now.moment.inputs)),
        )
        self.entry.add(forward)
        now.moment.ledger.begins(forward)
        return forward

    def explain(self, refused: BudgetError, waiting: int, plain: AsPlain) -> BudgetError:
        """The error `refused` of a call, with a budget that has room for the call and, with nothing recomputed, for the
        forwards that waited when it began; `waiting` is their number. The error's text says so if fewer waiting
        forwards were expected. `plain` returns what the call needs without a plan."""
        if waiting:
            refused = refused.adding(smallest_bytes=self._beside_waiting(refused.smallest_bytes, plain))
        refused = self.ledger.for_whole_step(self.entry, refused, plain)
        expected = self.entry.groups.others_expected
        return refused if expected >= waiting else refused.adding(_IN_GROUP.format(waiting + 1))

    def _beside_waiting(self, smallest_bytes: int, plain: AsPlain) -> int:
        """A budget with which a call fits together with the waiting forwards, if it needs `smallest_bytes` with what
        those hold now. In a larger budget these would save more: what they hold with nothing recomputed is counted.
        There is also some room for a few further forwards.
        """
        planned, needs, gradients = self.entry.waiting(), self.entry.step_bytes, self.entry.trainable_bytes
        held = [forward.held_bytes for forward in planned]
        saved = [forward.saved_bytes() for forward in planned]
        alone = [one.plan.plain.peak_bytes - one.plan.account.other_forwards for one in planned]
        more = _MORE_FORWARDS * needs.least_held if needs else 0
        for _ in range(2):
            works = smallest_bytes + sum(saved) - sum(held)
            works += min(more, max(0, max(alone, default=0) + sum(held) - smallest_bytes))
            earlier = self.entry.plain_held_bytes
            for peak, nbytes in zip(alone, saved, strict=True):
                works, earlier = max(works, peak + earlier + gradients), earlier + nbytes
            found = plain(works) if planned else None
            if found is None:
                break
            alone, saved = [found.budget_bytes] * len(planned), [found.held_bytes] * len(planned)
        for forward in self.entry.plain_waiting():
            works = max(works, self.entry.budget_bytes - forward.room_bytes + self.entry.found.other + gradients)
        if (found := plain(works) if self.entry.plain_waiting() else None) is not None:
            works = max(works, found.budget_bytes + self.entry.held_bytes)
        return works

    def _gradients_left(self) -> int:
        """The bytes of gradients that a further forward's backward leaves on the device during those of waiting
        ones."""
        return 0 if self.one_by_one and not self.entry.plain_waiting() else self.entry.trainable_bytes

    def _left_bytes(self, forward: WaitingPlain, call: Call) -> int:
        """The bytes of the budget that the step of a waiting plain forward leaves free while another call begins, if it
        were the only one that waits. Its own inputs are then found elsewhere too, and are counted once."""
        held = _have_gradients(parameters_in(modules_of(self.model)))
        counted = self._counted(call, held)
        elsewhere = counted.ledger.now(counted).beside(forward.account)
        given = {one.address for one in weak_storages(tensors_in(call))}
        own = sum(one.nbytes for one in forward.given if one.address not in given)
        return forward.room_bytes - self.entry.later_bytes - max(0, elsewhere - own)

    def _spare_bytes(self, call: Call) -> int:
        """The bytes that a further forward may hold during the backward of each waiting forward; at least one must
        wait. Negative where there is no room for any."""
        if self._room_beside(call) < self._gradients_left():
            return -1
        plain = [self._left_bytes(forward, call) + forward.held_bytes for forward in self.entry.plain_waiting()]
        plans = [(forward.plan, forward.held_bytes) for forward in self.entry.waiting()]
        planned = [_spare(plan) + held for plan, held in plans]
        return min(plain + planned) - self.entry.held_bytes

    def _room_beside(self, call: Call) -> int:
        """The fewest bytes of the budget that the backward of any waiting forward leaves free, while the forwards that
        began before it (for a plain one, all others) hold theirs."""
        left = [
            self._left_bytes(forward, call) - self.entry.held_bytes + forward.held_bytes
            for forward in self.entry.plain_waiting()
        ]
        earlier_bytes = 0
        for forward in self.entry.waiting():
            left.append(_spare(forward.plan) - forward.again_bytes - earlier_bytes)
            earlier_bytes += forward.held_bytes
        return min(left)


def _spare(plan: Plan) -> int:
    """The bytes of its budget that a plan leaves free where no other forward waits."""
    return plan.budget_bytes - plan.ceiling_bytes + plan.account.other_forwards


def _have_gradients(parameters: Iterable[nn.Parameter]) -> bool:
    return bool([parameter for parameter in parameters if parameter.grad is not None])


_HELD = attrgetter("held_bytes")
_ABOUT = 16
"""The bytes left for other models are kept while the current need differs by less than this part of the budget."""
_MOST_KINDS = 64
_MORE_FORWARDS = 2
"""A budget that is named for several forwards has room for this many more, each by the plan that holds least."""
_IN_GROUP = (
    "the first forward was planned as the only one before its backward; from the next step on {0} forwards are planned "
    "for; to plan so from the first step on, give optimize forwards={0}"
)

"""What lies on a device beside the steps of the optimised models of this process: one ledger for each device."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from memopt.account import elsewhere
from memopt.account.account import BOOKKEEPING_BYTES
from memopt.account.allocated import AllocationLimit, allocated_bytes
from memopt.account.elsewhere import Found
from memopt.compat.storages import weak_storages
from memopt.device.devices import device_of
from memopt.planning.plan import Plan
from memopt.planning.planner import LITTLE
from memopt.planning.situation import Situation
from memopt.run.entry import Entry
from memopt.training_state import CallState

_PATIENCE = 50
"""Looks for small growth take at most one part in this many of the time."""
_WORTHWHILE = 16
"""Room that has become free is planned for where it is at least this part of the budget."""
_MORE_STATE = 2
"""An optimiser that nobody has looked at may hold this many times the state of its class's defaults beside that: for
`amsgrad`, and the temporaries of `foreach`."""


@dataclass(frozen=True, eq=False)
class Moment:
    """A moment at which a step of a model has to fit beside everything else on the device: the beginning of a training
    call, or of a backward. It has what is counted already, because it belongs to the step or to a forward."""

    entry: Entry
    kind: object = None
    """Equal for moments at which the same things are allocated, for each of which growth is noted by itself."""
    inputs: tuple[torch.Tensor, ...] = ()
    """The call's."""
    waiting: int = 0
    """The number of forwards of this model that wait for their backward, with plan or without."""
    waiting_bytes: int = 0
    """The bytes that they hold."""
    others_bytes: int = 0
    """The bytes that such forwards of other models hold."""
    addresses: Callable[[], frozenset[int]] = frozenset
    """Returns the addresses of what forwards hold and returned."""
    bucket_bytes: int = 0
    """Held by the buckets of `DistributedDataParallel`, which the account has in a row of its own."""
    buckets: frozenset[int] = frozenset()
    """The addresses of the buckets that are known."""
    gradients: int = 0
    """Bytes of the gradients that the backward of another forward leaves."""
    spare_bytes: int | None = None
    """The bytes that this call may hold beside the backwards of those that wait; None where none waits."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The call's inputs, and the copies by which calls can be undone now: a call's are made after it begins."""
        return (*self.inputs, *CallState.copies_of(self.entry.model))

    @property
    def known_bytes(self) -> int:
        """The bytes that differ from call to call and are known."""
        inputs = sum(tensor.nbytes for tensor in self.tensors if tensor.layout == torch.strided)
        return inputs + self.waiting_bytes + self.others_bytes

    @property
    def _ledger(self) -> Ledger:
        return Ledger.of(self.entry)

    @property
    def to_come(self) -> int:
        """The number of forwards that are expected to follow before the first backward."""
        return max(0, self.entry.others_expected - self.waiting)

    @property
    def in_group(self) -> Situation | None:
        """The situation of one of several forwards that hold as much as each other; None where none is expected."""
        if not self.entry.others_expected:
            return None
        return Situation(other_forwards=self.gradients, to_come=max(self.entry.others_expected, self.waiting))

    def fits(self, plan: Plan, situation: Situation) -> bool:
        """Whether a plan that was made for a situation leaves room for all that is here, and that is to come."""
        account, others = plan.account, self.waiting_bytes
        if situation.to_come:
            others += self.to_come * plan.held_bytes + self.gradients
        elif self.to_come:
            held = plan.held_bytes if self.entry.held_after is None else self.entry.held_after
            others += self.to_come * held + self.gradients
        if situation.elsewhere is None and self._has_shrunk(plan):
            return False
        alone = plan.ceiling_bytes - account.other_forwards - account.elsewhere
        return self.elsewhere_within(plan, plan.budget_bytes - alone - others)

    def _has_shrunk(self, plan: Plan) -> bool:
        """Whether a plan that costs time was made beside far more bytes elsewhere than there are now."""
        enough = plan.budget_bytes // _WORTHWHILE
        if plan.added_time <= LITTLE or plan.account.elsewhere < enough:
            return False
        about = self._ledger.about(self)
        return plan.account.elsewhere - about - self.entry.later_bytes >= enough

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
        if self._surely_within(room_bytes, optimizer_state):
            return True
        return self._ledger.now(self).beside(optimizer_state) + self.entry.later_bytes <= room_bytes

    def _surely_within(self, room_bytes: int, optimizer_state: int) -> bool:
        """Whether a bound that is known at once says that the bytes elsewhere are at most `room_bytes`."""
        if not self.entry.has_looked:  # the optimiser may have options by which it holds more than by default
            room_bytes -= _MORE_STATE * optimizer_state
        most = self._ledger.at_most(self, room_bytes - self.entry.later_bytes)
        return most is not None and most.beside(optimizer_state) + self.entry.later_bytes <= room_bytes

    def elsewhere_bytes(self, plan: Plan) -> int:
        """The bytes elsewhere on the device now, beside a step by a plan."""
        return self._ledger.now(self).beside(plan.account.optimizer_state) + self.entry.later_bytes


class Ledger:
    """Counts what lies on a device beside the steps of the optimised models there.

    Python's objects are walked when a plan is made; later only where the bytes allocated on the device have grown so
    much that a plan might not fit.
    """

    _by_device: ClassVar[dict[torch.device, Ledger]] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entries: weakref.WeakSet[Entry] = weakref.WeakSet()
        """Of the models of which a call has begun here."""
        self._limit = AllocationLimit(device)
        self._next_look = 0.0
        self._held_still = False

    @classmethod
    def of(cls, entry: Entry) -> Ledger:
        """The ledger of the device on which a model is, with the model in it."""
        device = entry.device
        if device not in cls._by_device:
            cls._by_device[device] = cls(device)
        ledger = cls._by_device[device]
        ledger.entries.add(entry)
        return ledger

    def others(self, entry: Entry) -> list[Entry]:
        """The other models' entries."""
        return [other for other in self.entries if other is not entry]

    def others_held_bytes(self, entry: Entry) -> int:
        """The bytes that forwards of other models hold which wait for their backward."""
        return sum(other.held_bytes for other in self.others(entry))

    def others_waiting(self, entry: Entry) -> int:
        """The number of planned forwards of other models that wait for their backward."""
        return sum(len(other.waiting()) for other in self.others(entry))

    def addresses(self, entry: Entry) -> frozenset[int]:
        """The addresses of what waiting forwards of all models hold, and of what this model's latest one returned."""
        forwards = [forward for one in self.entries for forward in one.waiting()]
        outputs = [*(one.outputs for one in forwards), *(one.outputs for of in self.entries for one in of.plain)]
        returned = [storage.address for storages in outputs for storage in storages]
        saved = weak_storages(tensor for forward in forwards for tensor in forward.held())
        return frozenset((*returned, *(storage.address for storage in (*saved, *entry.latest_outputs))))

    @contextmanager
    def held_still(self, moment: Moment) -> Iterator[None]:
        """A context in which what appears is not counted, for copies that are made to check a step."""
        self.now(moment)
        before, self._held_still = self._held_still, True
        try:
            yield
        finally:
            self._held_still = before

    def at_most(self, moment: Moment, enough: int = 0) -> Found | None:
        """No less than what is there now, read in microseconds; None where only a look can tell. A limit that is at
        most `enough` bytes may be far above what is there: finding it takes less time."""
        entry = moment.entry
        if entry.fixed_bytes is not None:
            return Found(entry.fixed_bytes)
        if self._held_still:
            return entry.found
        if enough and (limit := self._limit.bytes()) is not None and limit <= enough:
            return Found(limit)
        growth = self._growth(moment)
        if growth is None or growth < -entry.notable_bytes:  # what was freed since may hide what has grown
            return None
        found = self._found_at(moment)
        return replace(found, other=found.other + max(0, growth))

    def about(self, moment: Moment) -> int:
        """The bytes of other tensors that are there now, as far as it is known without a look."""
        fixed = moment.entry.fixed_bytes
        found = self._found_at(moment).other if fixed is None else fixed
        growth = None if self._held_still or fixed is not None else self._growth(moment)
        return found + min(0, growth or 0)

    def now(self, moment: Moment) -> Found:
        """The bytes elsewhere now. Small growth may be found some seconds late, since walks over all objects are
        limited to a small part of the time.

        Garbage that has not been collected is collected before growth is believed.
        """
        entry = moment.entry
        if entry.fixed_bytes is not None:
            return Found(entry.fixed_bytes)
        growth = self._growth(moment)
        # Growth is unknown at the first moment of a kind, too, and may be large: only a look can tell.
        little = allocated_bytes(self.device) is None if growth is None else abs(growth) < entry.notable_bytes
        patient = little and time.monotonic() < self._next_look
        none = growth is not None and abs(growth) < BOOKKEEPING_BYTES
        before = self._found_at(moment)
        if self._held_still or patient or none:
            entry.found = before
            return before
        found = self._look(moment)
        if found.other - before.other > entry.notable_bytes:
            gc.collect()
            found = self._look(moment)
        entry.found = found
        return found

    def _found_at(self, moment: Moment) -> Found:
        """What the latest look at such a moment found: what lies elsewhere in a forward may be the step's own in its
        backward. Where there was none, or what appears is not counted, what the latest look at any moment found."""
        looked = None if self._held_still else moment.entry.looks.get(moment.kind)
        return moment.entry.found if looked is None else looked[0]

    def _growth(self, moment: Moment) -> int | None:
        """The bytes allocated beyond those at the latest look at such a moment; None where that is not known."""
        looked = moment.entry.looks.get(moment.kind)
        allocated = allocated_bytes(self.device)
        if allocated is None or looked is None or looked[1] is None:
            return None
        return allocated - moment.known_bytes - looked[1]

    def _look(self, moment: Moment) -> Found:
        started = time.monotonic()
        entry, kind = moment.entry, device_of(self.device)
        found = elsewhere.look(
            entry.model,
            self.device,
            moment.tensors,
            moment.addresses(),
            waiting_bytes=moment.waiting_bytes,
            others_bytes=moment.others_bytes,
            bucket_bytes=moment.bucket_bytes,
            buckets=moment.buckets,
            libraries=sum(kind.library_workspaces(kind.reported(self.device))) if kind.caching else 0,
        )
        found = found if entry.with_state else replace(found, state=0)
        allocated = allocated_bytes(self.device)
        entry.looks[moment.kind] = found, None if allocated is None else allocated - moment.known_bytes
        self._limit = AllocationLimit(self.device)
        ended = time.monotonic()
        self._next_look = ended + _PATIENCE * (ended - started)
        return found

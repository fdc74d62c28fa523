"""Counts the bytes on a device outside of the steps of this process's optimised models: one ledger for each device."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from memopt.account import elsewhere
from memopt.account.account import BOOKKEEPING_BYTES, Account
from memopt.account.eager_bytes import allocated_bytes, allocation_limit
from memopt.account.elsewhere import Elsewhere, in_steps
from memopt.compat.host import profiler_is_active
from memopt.device.devices import device_of
from memopt.errors import BudgetError
from memopt.meter import PeakMeter
from memopt.planning.derived import forward_bytes, lasting_bytes, retained_peak, tangent_bytes
from memopt.planning.plan import Plan
from memopt.planning.planner import NEGLIGIBLE
from memopt.planning.terms import Situation
from memopt.run.entry import WORTHWHILE, Entry
from memopt.run.hosted import home_device
from memopt.run.models_on_device import ModelsOnDevice
from memopt.run.seen import LatestLooks
from memopt.training_state import CallState
from memopt.units import size

_SHARE_OF_TIME = 0.01
"""Searches of the device take at most this share of the time, apart from those without which a step would be refused,
or nothing would be known of the bytes elsewhere."""
_LOOKS = 4
"""The number of latest searches, at moments of one kind, from which an upper bound of the bytes elsewhere follows."""
_MALLOC_NOISE = 64 * 1024
"""The bytes allocated by `malloc` differ by this much from step to step, through what Python and the C library allocate
beside tensors."""
SEVERAL = 3
"""If this many forwards wait for a backward, more than in any earlier step, more may follow: an ODE solver calls its
model dozens of times before a backward."""
_FITTED = "allocated when a backward that fitted began"
_MORE_STATE = 2
"""An optimizer that was not found yet may hold this many times the default state of its class in addition: for
`amsgrad`, and the temporaries of `foreach`."""


@dataclass(frozen=True, eq=False)
class Moment:
    """A moment at which a step of a model must fit together with everything else on the device: the beginning of a
    training call or of a backward. Its fields say which bytes on the device are counted already, in the step or in
    another forward."""

    entry: Entry
    ledger: Ledger
    """The ledger of the device that the model of `entry` is on."""
    kind: object = None
    """A key that is equal for moments at which the same things are allocated; growth is measured for each kind
    separately."""
    inputs: tuple[torch.Tensor, ...] = ()
    """The tensors of the call; none in a backward."""
    waiting: int = 0
    """The number of forwards of this model that wait for their backward, with plan or without."""
    waiting_bytes: int = 0
    """The bytes that these forwards hold."""
    others_bytes: int = 0
    """The bytes that waiting forwards of other models hold."""
    lasting_bytes: int = 0
    """The bytes of gradients and optimizer states that other optimised models have or will have."""
    lasting_now: int = 0
    """The part of `lasting_bytes` that exists now."""
    addresses: Callable[[], frozenset[int]] = frozenset
    """Returns the addresses of the memory that forwards hold or have returned."""
    bucket_bytes: int = 0
    """The bytes of `DistributedDataParallel`'s buckets, which have a row of their own in the account."""
    buckets: frozenset[int] = frozenset()
    """The addresses of the buckets found so far."""
    later_bytes: int = 0
    """Bytes that forwards of other models will hold in the backward, as seen in earlier steps; 0 in a backward."""
    appears: bool = False
    """Whether tensors that appear between a forward and its backward (`Entry.to_appear`) are still to come."""
    gradients: int = 0
    """Bytes of the gradients that the backward of another forward leaves."""
    spare_bytes: int | None = None
    """The bytes that this call may hold during the backwards of waiting forwards; None where none waits."""
    kept_outputs: int = 0
    """Bytes of the previous forward's outputs that the caller still holds when this one begins, as with `out =
    model(batch)` in a loop: they are freed only after this one returns."""
    hidden_bytes: int = 0
    """The bytes of waiting forwards that a search of the device counts as elsewhere (`hidden_bytes` of each)."""
    closely: bool = False
    """Whether the device is searched however long that takes; no call is refused without that."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The call's inputs, and the copies by which earlier calls can be undone (those of this call are made
        later)."""
        return (*self.inputs, *CallState.copies_of(self.entry.model))

    @property
    def known_bytes(self) -> int:
        """The bytes outside of the plan that memopt knows without searching the device: the call's inputs, what waiting
        forwards hold, outputs that the caller keeps, and gradients and optimizer states of other optimised models. They
        do not count as elsewhere."""
        inputs = sum([tensor.nbytes for tensor in self.tensors if tensor.layout == torch.strided])
        return inputs + self.waiting_bytes + self.kept_outputs + self.lasting_now

    @property
    def to_come_elsewhere(self) -> int:
        """The bytes elsewhere that do not exist yet: gradients and optimizer states that other models will hold, and
        what is expected to appear before the backward."""
        return self._later(0) + self.lasting_bytes

    def _later(self, elsewhere: int) -> int:
        """The bytes that will appear before the backward, if there are `elsewhere` bytes elsewhere now."""
        return max(self.later_bytes, self.entry.to_appear(elsewhere) if self.appears else 0)

    @property
    def others_train(self) -> bool:
        """Whether other optimised models train on the device."""
        return bool(self.ledger.others_training(self.entry))

    @property
    def to_come(self) -> int:
        """The number of forwards that are expected to follow before the first backward."""
        return max(0, self.entry.groups.others_expected - self.waiting)

    @property
    def beyond_expected(self) -> int:
        """The number of further forwards to leave room for, because more wait now than were expected: as many as wait,
        if at least `SEVERAL` do. Else 0."""
        return self.waiting if self.waiting >= max(SEVERAL, self.entry.groups.others_expected + 1) else 0

    def in_group(self, situation: Situation) -> Situation | None:
        """The situation in which one plan serves all forwards before a backward: each leaves room for the others, which
        hold as many bytes as this one. None where no further forward is expected."""
        to_come = max(expected := self.entry.groups.others_expected, self.waiting)
        return replace(situation, other_forwards=self.gradients, to_come=to_come) if expected else None

    def fits(self, plan: Plan, situation: Situation) -> bool:
        """Whether a plan made for `situation` leaves room for everything else that is on the device now or is expected.
        Also False for a plan that recomputes and was made while tensors outside of the step held far more of the device
        than now: a faster one is possible."""
        further = self.to_come * (plan.held_bytes if situation.to_come else self.entry.groups.held_after(plan))
        if situation.elsewhere is None and self._has_shrunk(plan):
            return False
        if self.plain_backward_bytes and not self.may_hold(plan.held_bytes):
            return False
        return self.may_fit(plan, further)

    def still_fits(self, plan: Plan, situation: Situation) -> bool:
        """Whether a plan made for another situation fits now, too. Also False for one that recomputes and was made
        while other tensors or forwards held far more than now: a faster one is possible."""
        account = plan.account
        if self._has_shrunk(plan, account.other_forwards - self.waiting_bytes - self.kept_outputs):
            return False
        less = account.elsewhere + account.tolerance // 2 < self.ledger.most_elsewhere(self)
        return (replace(self, closely=True) if less else self).fits(plan, situation)

    def _alone(self, plan: Plan) -> int:
        """The bytes that a step by a plan holds if nothing else but the caller's own code does."""

        def figure() -> int:
            beside = plan.account.other_forwards + plan.account.elsewhere
            until_backward = plan.held_bytes + tangent_bytes(plan) + self.callers_code(plan)
            in_forward = forward_bytes(plan) + self.kept_outputs if self.kept_outputs or dropped else 0
            in_step = self.entry.peak_above_lasting(plan) + lasting_bytes(plan.account, beside=True) - dropped
            if self.entry.graph.kept and plan.schedule is not None:
                in_step += max(0, retained_peak(plan, plan.schedule) - plan.ceiling_bytes)
            return max(in_step, plan.account.resident_bytes + max(until_backward, in_forward)) - beside

        code, dropped = self.entry.callers_code, self.entry.dropped_outputs(plan)
        seen = code.meanwhile, code.returned_bytes, self.kept_outputs, dropped, self.entry.graph.kept
        return self.entry.figure(("alone", *seen), plan, figure)

    def callers_code(self, plan: Plan) -> int:
        """The bytes that the caller's own code allocates between the forward and the backward of a plan: as seen in
        earlier steps, else as the plan assumes."""
        seen = self.entry.until_backward(tangent_bytes(plan))
        return plan.account.meanwhile if seen is None else seen

    def beside_callers_code(self, situation: Situation, plan: Plan) -> Situation:
        """The situation with the bytes that the caller's own code was seen to allocate during steps like those of
        `plan`; unchanged where nothing was seen."""
        if self.entry.callers_code.meanwhile is None:
            return situation
        return replace(situation, meanwhile=in_steps(self.callers_code(plan), plan.budget_bytes))

    def left_before_state(self, plan: Plan) -> int:
        """The bytes that other tensors may take until the optimizer makes its state: what is left of the budget, plus
        what `plan` keeps free for state that does not exist yet (0 on a GPU), but at most the bytes of that state."""
        elsewhere = self.elsewhere_beside(plan.account)
        room = plan.budget_bytes - self._alone(plan) - self.waiting_bytes - elsewhere
        missing = max(0, plan.account.optimizer_state - self.entry.found.state)  # as just found
        return min(missing, self.entry.state_to_come(plan, 0, elsewhere) + room)

    def _has_shrunk(self, plan: Plan, more: int = 0) -> bool:
        """Whether a plan that recomputes was made while there were far more bytes than now elsewhere, and (`more`
        bytes) in other forwards."""
        enough, beside = plan.budget_bytes // WORTHWHILE, plan.account.elsewhere + more
        if plan.added_time <= NEGLIGIBLE or beside < enough:
            return False
        about = self.ledger.latest_elsewhere(self)
        return beside - about - self.to_come_elsewhere >= enough

    def others_in_backward(self, gradients_held: bool) -> int:
        """The bytes that the model holds beside this call's plan while the call's backward runs: first of all what
        waiting forwards have saved. If further forwards are to come before that backward, the gradients that other
        forwards' backwards leave are added. If none are to come, but some wait and the plan counts on gradients from
        before the step (`gradients_held`), half of the gradients are added: one backward through all forwards sums
        gradients outside of `.grad` until it ends."""
        if self.to_come:
            return self.waiting_bytes + self.gradients
        return self.waiting_bytes + (self.gradients // 2 if self.waiting and gradients_held else 0)

    def may_fit(self, plan: Plan, further_bytes: int = 0) -> bool:
        """Whether a plan leaves room for everything else on the device now and for `further_bytes`, if the backwards of
        forwards that are still to come run before its own."""
        account = plan.account
        others = self.others_in_backward(account.gradients_held) + further_bytes
        return self.leaves(plan.budget_bytes - self._alone(plan) - others + account.tolerance // 2, account)

    def for_sizes_above(self, refused: BudgetError, above: BudgetError) -> BudgetError:
        """`refused`, the error of a call, with a budget that works for larger calls too, which came before and may come
        again; unchanged where that budget is no larger. It is the budget of `above`, the error of the larger calls,
        plus the bytes by which tensors outside of the step took more at an earlier forward than now."""
        grown = max(0, self.entry.most_elsewhere - self.entry.found.other)
        smallest = above.smallest_bytes + grown + self.entry.notable_bytes  # growth too small for a search
        if smallest <= refused.smallest_bytes:
            return refused
        more = size(smallest - refused.smallest_bytes)
        words = f"{more} of the budget that works are for the largest batches seen, with a margin where batches grow"
        return refused.adding(words, smallest_bytes=smallest)

    @property
    def plain_backward_bytes(self) -> int:
        """The most bytes that the backward of a waiting plain forward of this model, which may run while this call
        waits for its own, needs beyond what the forward holds. 0 where none waits."""
        return max([one.peak_bytes - one.held_bytes for one in self.entry.plain], default=0) if self.entry.plain else 0

    def may_hold(self, held_bytes: int) -> bool:
        """Whether this call may hold `held_bytes` until its backward, so that the backwards of waiting forwards have
        enough room if they run before it."""
        return self.spare_bytes is None or held_bytes <= self.spare_bytes

    def reserved_bytes(self, held_bytes: int) -> int:
        """The bytes that a step without a plan has to leave free if it holds `held_bytes` until its backward: for
        waiting forwards, for those to come (as large as this one), for the gradients that the first of their backwards
        leaves, and for other models' steps."""
        several = self.waiting or self.to_come
        group = self.to_come * held_bytes + (self.gradients if several else 0)
        wanted, broader = self.ledger.wanted(self.entry)
        return self.waiting_bytes + group + wanted + int(broader * held_bytes)

    def leaves(self, room_bytes: int, account: Account) -> bool:
        """Whether everything on the device now, except the step that `account` describes, takes at most
        `room_bytes`: by a bound that needs no search of the device, or else by a search."""
        surely = room_bytes
        if not self.entry.has_looked:  # the optimizer's options may make it hold more than by default
            surely -= _MORE_STATE * account.optimizer_state
        most = self.ledger.at_most(self, surely - self.to_come_elsewhere)
        if most is not None and self._beside(most, account) <= surely:
            return True
        return self.elsewhere_beside(account) <= room_bytes

    def elsewhere_beside(self, account: Account) -> int:
        """The bytes that are on the device now and do not belong to a step with this account."""
        return self._beside(self.ledger.now(self), account)

    def known_elsewhere(self, account: Account) -> int:
        """The bytes elsewhere, outside of a step with this account, as far as they are known without a search of the
        device. In a backward, a search would also count what the step has saved."""
        return self._beside(replace(self.entry.found, other=self.ledger.latest_elsewhere(self)), account)

    def _beside(self, found: Elsewhere, account: Account) -> int:
        elsewhere = max(0, found.beside(account) - self.hidden_bytes)
        return elsewhere + self._later(found.other) + self.lasting_bytes


class Ledger(ModelsOnDevice):
    """Counts the bytes on a device outside of the steps of the optimised models there.

    Python's objects are searched for tensors when a plan is made, and later only if the bytes allocated on the device
    have grown so much that a plan might not fit."""

    _by_device: ClassVar[dict[torch.device, Ledger]] = {}

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self._kind = device, device_of(device)
        self.look_seconds = 0.0
        """The seconds that searches have taken, without those that belong to planning."""
        self._since: float | None = None
        """When the first plan was made, by `time.monotonic`; None before."""
        self._latest_seconds = 0.0
        self._limit = allocation_limit(device)
        self._held_still = False

    @classmethod
    def of(cls, entry: Entry) -> Ledger:
        """The ledger of the device that the model of `entry` is on; `entry` is added to it."""
        device = home_device(entry.model)
        if device not in cls._by_device:
            cls._by_device[device] = cls(device)
        ledger = cls._by_device[device]
        ledger.entries.add(entry)
        return ledger

    @contextmanager
    def held_still(self, moment: Moment) -> Iterator[None]:
        """A context in which the bytes elsewhere count as unchanged since its beginning, at `moment`: what is allocated
        in it are copies made to check a step."""
        self.now(moment)
        before, self._held_still = self._held_still, True
        try:
            yield
        finally:
            self._held_still = before

    def at_most(self, moment: Moment, enough: int = 0) -> Elsewhere | None:
        """An upper bound on the bytes elsewhere now, found in microseconds without a search of the device; None where
        only a search can tell. Any bound of at most `enough` bytes will do."""
        entry = moment.entry
        if entry.fixed_bytes is not None:
            return Elsewhere(entry.fixed_bytes)
        if self._held_still:
            return entry.found
        if enough and (limit := self._limit()) is not None and limit <= enough:
            return Elsewhere(limit)
        return self._limit_by(entry, *self._level(moment))

    def latest_elsewhere(self, moment: Moment) -> int:
        """The bytes that tensors of other code held at the latest search at a moment of the same `Moment.kind`, less
        what has been freed since. The device is not searched."""
        entry = moment.entry
        if entry.fixed_bytes is not None:
            return entry.fixed_bytes
        level, looked = self._level(moment)
        if self._held_still or looked is None:
            return entry.found.other
        return looked.found.other + (0 if level is None else min(0, level - looked.level))

    def most_elsewhere(self, moment: Moment) -> int:
        """The most bytes elsewhere that any of the last few searches of the device found, at moments of the same
        `Moment.kind` as `moment`; 0 if there was none. Some of these bytes may have been freed since. The device is not
        searched now. Where the user gave the bytes elsewhere (`elsewhere_gb`), these are returned."""
        _, looked = self._level(moment)
        return moment.entry.fixed_bytes or (0 if looked is None else looked.most)

    def fits_as_before(self, entry: Entry, plan: Plan, needed: int) -> bool:
        """Whether a backward of a plan surely fits the budget, as the bytes allocated now plus `needed` are no more
        than when an earlier backward of the plan fitted. `needed` is what the backward takes of the budget. Found in
        microseconds. False where other optimised models train, and in DDP, whose buckets are looked for in each
        backward."""
        source, allocated = self._reading()
        fitted = entry.figures.get(((_FITTED, source), id(plan)))
        if fitted is None or allocated is None or plan.account.buckets or self.others_training(entry):
            return False
        return allocated + needed < fitted[1] + BOOKKEEPING_BYTES

    def note_fits(self, entry: Entry, plan: Plan, needed: int) -> None:
        """Record that the backward that begins now fits the budget; `fits_as_before` compares later ones with it. To be
        called after a search of the device, which frees garbage."""
        source, allocated = self._reading()
        if allocated is not None:
            entry.figures[(_FITTED, source), id(plan)] = plan, allocated + needed

    def look_before_planning(self, moment: Moment) -> Elsewhere:
        """Search the device for the bytes elsewhere before a call is planned, however long it takes. Planning leaves
        memory of its own behind, so the device is also searched at the next moment."""
        found = self.now(replace(moment, closely=True), planning=True)
        self._since, moment.entry.due = self._since or time.monotonic(), True
        return found

    def now(self, moment: Moment, *, planning: bool = False) -> Elsewhere:
        """The bytes elsewhere now; an upper bound where a search would take too much of the training time. `planning`:
        the search is part of planning, so that its time does not count.

        Growth counts only if it is still there after Python's garbage has been collected; while searches have used up
        their share of the time, growth within the noise of `malloc` is ignored."""
        entry = moment.entry
        if entry.fixed_bytes is not None:
            return Elsewhere(entry.fixed_bytes)
        level, looked = self._level(moment)
        before = entry.found if self._held_still or looked is None else looked.found
        change = None if level is None or looked is None else abs(level - looked.level)
        as_before = change is not None and change < BOOKKEEPING_BYTES
        noise_bytes = _MALLOC_NOISE if self._kind.is_host else 0  # though no tensor was allocated
        noise = change is not None and change < noise_bytes and not entry.due and not planning
        if not self._held_still and not as_before and not (noise and not self.may_look()):
            limit = self._limit_by(entry, level, looked)
            # At the first moment of a kind, too, only a search can tell.
            needed = moment.closely or entry.due or (limit is None and level is not None)
            new = level is not None and looked is not None and level > looked.highest + entry.notable_bytes
            if needed or new or looked is None or self.may_look():
                before = self._look(moment, before, planning=planning or entry.due)
            elif limit is not None:
                return limit
        entry.found = before
        return before

    def _limit_by(self, entry: Entry, level: int | None, looked: LatestLooks | None) -> Elsewhere | None:
        """An upper bound of the bytes elsewhere, from the bytes that are allocated now (`level`) and the latest
        searches; None where these give none."""
        if level is None or looked is None or level < looked.lowest - entry.notable_bytes:
            return None  # tensors freed since may hide others that have grown
        return replace(looked.found, other=looked.limit(level))

    def may_look(self) -> bool:
        """Whether a further search of the device stays within the share of training time that searches may take."""
        since = time.monotonic() - (self._since or time.monotonic())
        return self.look_seconds + self._latest_seconds <= _SHARE_OF_TIME * since

    def _level(self, moment: Moment) -> tuple[int | None, LatestLooks | None]:
        """The bytes allocated without those that memopt accounts for, None where that is not known; and the latest
        searches at moments of the same kind: what is elsewhere in a forward may be the step's own in its backward."""
        source, allocated = self._reading()
        level = None if allocated is None else allocated - moment.known_bytes
        kind = moment.kind, "allocator" if allocated is None else source
        return level, moment.entry.looks.get(kind)

    def _reading(self) -> tuple[str, int | None]:
        """The source from which the bytes allocated on the device are read, and their number. The number is None while
        another profiler runs, whose records are in memory of `malloc`. While memopt's own meter runs, it counts what
        tensors hold; in a backward, what they held at the latest reading before."""
        if self._kind.caching or not profiler_is_active():
            return "allocator", allocated_bytes(self.device)
        meter = PeakMeter.running()
        return ("meter", meter.held_bytes()) if meter else ("profiler", None)

    def _look(self, moment: Moment, before: Elsewhere, *, planning: bool) -> Elsewhere:
        started, entry = time.monotonic(), moment.entry
        found = self._found(moment)
        source, _ = self._reading()
        key, looked = (moment.kind, source), entry.looks.get((moment.kind, source))
        if found.other - before.other > entry.notable_bytes:
            more = looked is None or found.other - looked.most > entry.notable_bytes
            gc.collect(2 if more else 1)  # bytes that earlier steps had too need not be garbage
            found = self._found(moment)
        _, allocated = self._reading()
        level = (allocated or 0) - moment.known_bytes
        levels = looked.levels if looked is not None and not entry.due else deque(maxlen=_LOOKS)
        levels.append((level, level - found.other))
        highest = level if looked is None or entry.due else max(level, looked.highest)
        entry.looks[key], entry.due = LatestLooks(found, levels, highest), False
        entry.most_elsewhere = max(entry.most_elsewhere, found.other if moment.appears else 0)
        self._limit = allocation_limit(self.device)
        self._latest_seconds = time.monotonic() - started
        self.look_seconds += 0 if planning else self._latest_seconds
        return found

    def _found(self, moment: Moment) -> Elsewhere:
        """The result of a search of the device at `moment`."""
        entry, kind = moment.entry, self._kind
        found = elsewhere.look(
            entry.model,
            self.device,
            moment.tensors,
            moment.addresses(),
            waiting_bytes=moment.waiting_bytes + moment.lasting_now,
            others_bytes=moment.others_bytes,
            plain_bytes=sum(one.plain_held_bytes for one in self.entries),
            bucket_bytes=moment.bucket_bytes,
            buckets=moment.buckets,
            libraries=sum(kind.library_workspaces(kind.reported(self.device))) if kind.caching else 0,
        )
        return replace(found, state=found.state if entry.optimizer is not None else 0)

"""One optimised model in the ledger of its device: its waiting forwards, and the bytes found outside of its steps."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from memopt.account.account import Account, distinct_bytes
from memopt.account.elsewhere import Elsewhere
from memopt.account.optimizer_account import optimizer_account
from memopt.account.optimizer_trial import GivenOptimizer, held_tensors, parameters_of
from memopt.compat.autograd import FREED, Retention
from memopt.compat.tensors import WeakStorage, bytes_by_address, bytes_still_there
from memopt.errors import BudgetError
from memopt.lru import LruCache
from memopt.planning.derived import StepBytes, peak_above_lasting, returned_bytes
from memopt.planning.plan import Plan
from memopt.run.hosted import home_device
from memopt.run.seen import REMEMBERED, ForwardGroups, LatestLooks, Overlap

_TOLERANCE = 64
"""Tensors that appear on the device outside of a step are tolerated up to the parameters' bytes divided by this: a
256th of parameters, gradients and two optimizer states."""
_LEAST_TOLERANCE = 64 * 1024
"""The smallest tolerance in bytes: Python and `malloc` need some of their own."""
_MOST_KINDS = 64
"""The number of kinds of moments (`Moment.kind`) of a model for which searches are remembered."""
_MOST_PLANS = 8
"""The number of a model's latest plans whose step bytes are remembered."""
WORTHWHILE = 16
"""A call is planned again for freed memory if that is at least the budget divided by this; and a further warning of
steps beyond the budget is given if they need so much more."""
_numbers = count(1)
"""Numbers the forwards of all models in the order in which they begin."""


@dataclass(eq=False, kw_only=True)
class Waiting(ABC):
    """A forward that may wait for its backward."""

    entry: Entry
    held_bytes: int
    """The bytes that it holds until its backward, without resident bytes."""
    account: Account
    """The bytes of its step other than activations."""
    given: tuple[WeakStorage, ...] = ()
    """The storages of the call's inputs."""
    number: int = 0
    """Its number among all forwards, in the order in which they began."""
    overlaps: set[Overlap] = field(default_factory=set)
    """The forwards of other models that have run since it began."""
    runs_plain_from: Callable[..., int | None] = lambda elsewhere, most, graph=FREED: None
    """Returns the smallest budget with which the call runs plain, with this many bytes elsewhere, if its backwards keep
    its graph as `graph` says; None where that is above `most` or not known."""

    @abstractmethod
    def free_saved(self) -> int:
        """Free what the forward has saved, and make its backward run the forward a second time. Returns the bytes
        freed; 0 where it cannot be run again."""

    @abstractmethod
    def saved_bytes(self) -> int:
        """The bytes that the forward would hold until its backward with nothing recomputed."""


@dataclass(eq=False, kw_only=True)
class WaitingPlanned(Waiting):
    """A planned forward, as the device's `Ledger` knows it; `PendingForward` is its implementation."""

    plan: Plan
    outputs: list[WeakStorage] = field(default_factory=list)
    """The storages of the outputs of its regions, and of tensors that code between them returned and saved."""
    done: bool = False
    again_bytes: int = 0
    """The bytes beyond the plan that its backward needs if the forward runs a second time in it; else 0."""
    judged: bool = True
    """Whether its backward is refused where it would exceed the budget."""

    @abstractmethod
    def hidden_bytes(self) -> int:
        """The bytes of the forward's saved tensors if the caller's hooks (`saved_tensors_hooks`) made them: a search of
        the device counts such tensors as elsewhere, outside of the step. Else 0."""

    @abstractmethod
    def held(self) -> list[torch.Tensor]:
        """The tensors that the forward's regions, and eager code between them, have saved and that are not freed
        yet."""

    @abstractmethod
    def undo(self) -> bool:
        """Undo the call after its backward has failed; returns whether gradients, buffers and random states are as
        before the call."""

    @abstractmethod
    def is_in_backward(self) -> bool:
        """Whether the running backward has reached this forward."""


@dataclass(eq=False, kw_only=True)
class WaitingPlain(Waiting):
    """A forward that ran without a plan, as the device's `Ledger` knows it; `PlainForward` is its implementation."""

    room_bytes: int
    """The bytes of the budget that its step leaves free, if no other forward waits and nothing is elsewhere."""
    peak_bytes: int
    """The most bytes that its forward and backward hold, without resident bytes."""
    outputs: tuple[WeakStorage, ...]
    """The storages of its outputs."""
    freed: bool = False
    """Whether a backward has begun that frees its graph."""


@dataclass
class CallersCode:
    """Bytes that the caller's own code was seen to hold between a model's forwards and backwards."""

    meanwhile: int | None = None
    """The most bytes, including the gradients of the outputs; None where that was not seen."""
    returned_bytes: int = 0
    """The most bytes of outputs, or of their gradients, of a forward for which `meanwhile` was measured."""
    metered: bool = False
    """Whether `meanwhile` was measured by a memory meter, which sees more than an autograd graph shows."""

    def note(self, nbytes: int, returned_bytes: int) -> None:
        """Record the bytes held between a forward that returned `returned_bytes` and its backward."""
        self.meanwhile = max(self.meanwhile or 0, nbytes)
        self.returned_bytes = max(self.returned_bytes, returned_bytes)


@dataclass(eq=False)
class Entry:
    """The record of one optimised model in a device's `Ledger`: its forwards that wait for their backward, which are
    removed when they are freed, and what was found on the device outside of its steps."""

    model: nn.Module
    budget_bytes: int
    fixed_bytes: int | None = None
    """The bytes that count as held elsewhere without a search: what the user gave as `elsewhere_gb`, or 0 for a plan
    for another device; None where the device is searched."""
    given_optimizer: GivenOptimizer = field(default_factory=lambda: GivenOptimizer(None))
    """The optimizer that the account counts, as the user gave it; state beyond that counts as elsewhere."""
    groups: ForwardGroups = field(default_factory=ForwardGroups)
    """The forwards that ran before each backward."""
    optimised: bool = False
    """Whether the model's calls are planned now, so that plans of other models leave room for its steps."""
    gradient_bytes: int | None = None
    """The most bytes of gradients that one of its plans or plain steps counts; None before the first."""
    state_bytes: int | None = None
    """The most bytes of its optimizer's state that one of its plans or plain steps counts; None before the first."""
    seen_meanwhile: deque[frozenset[Overlap]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """For each of its latest backwards, the steps of other models that ran since its forward."""
    seen_later: deque[Overlap] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """For each of its latest backwards, the forwards of other models that waited then and had begun after its own."""
    seen_models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """The optimised models that trained on the device when one of its backwards began."""
    latest_outputs: Sequence[WeakStorage] = ()
    """The storages of what the latest forward returned; callers often hold them until the next one returns."""
    later_bytes: int = 0
    """The most bytes elsewhere that were seen to appear between a forward and its backward."""
    reached_bytes: int | None = None
    """The bytes elsewhere when that backward began; None where they are not known. Those still present when the next
    forward begins are counted then, and do not appear again."""
    given_bytes: int | None = None
    """The most bytes of gradients that the caller's own code gives the model's parameters, as penalties on weights do;
    None before the first backward. On the host no search finds them: autograd keeps them until the model's backward has
    computed the others."""
    _callers_code: dict[bool, CallersCode] = field(default_factory=lambda: {False: CallersCode(), True: CallersCode()})
    """The `CallersCode` between a forward and its backward, by whether parameters of the model were
    trained: a discriminator is called in other code while it is frozen."""
    differentiated: bool = False
    """Whether gradients of one of its forwards were differentiated in turn (`create_graph=True`)."""
    outputs_in_backward: int | None = None
    """The most bytes of a forward's outputs that were still alive when its backward began; None before the first."""
    gradients_stay: bool | None = None
    """Whether gradients existed when a forward began after a backward; None before the first such forward."""
    changed_inputs: frozenset[int] = frozenset()
    """Numbers of the tensors of a call that the caller was seen to change in place between a plain forward and its
    backward."""
    paths: set[int] = field(default_factory=set)
    """The numbers of autograd nodes of forwards whose values or random numbers may choose which operators run: of those
    that were counted, and of those that ran more."""
    graph: Retention = FREED
    """The most that backwards were seen to keep of graphs (`retain_graph`), for which plain steps are counted."""
    seen_until_backward: int = 0
    """How many backwards through one forward were seen: the device was searched when each began, for tensors that
    appeared since the forward."""
    number: int = 0
    """The number of the latest forward, among the forwards of all models."""
    latest: weakref.ref[WaitingPlanned] | None = None
    """The planned forward that began last; None before the first."""
    found: Elsewhere = field(default_factory=Elsewhere)
    """The latest search's result, at any moment."""
    most_elsewhere: int = 0
    """The most bytes elsewhere that a search found when a forward began."""
    looks: LruCache[object, LatestLooks] = field(default_factory=lambda: LruCache(_MOST_KINDS))
    """The latest searches, by kind of moment."""
    due: bool = False
    """Whether a plan was made since the latest search: planning leaves memory of its own behind."""
    figures: LruCache[tuple[Hashable, int], tuple[Plan, int]] = field(default_factory=lambda: LruCache(_MOST_KINDS))
    """Numbers that depend on a plan, by their name and the `id` of the plan."""
    plans: LruCache[int, tuple[Plan, StepBytes | None]] = field(default_factory=lambda: LruCache(_MOST_PLANS))
    """The latest plans by their `id`, each with its `StepBytes` once these were asked for."""
    refusals: LruCache[Hashable, BudgetError] = field(default_factory=lambda: LruCache(_MOST_PLANS))
    """The refusals of calls while the caller kept outputs of the step before, by situation and shapes of the inputs."""
    plain_step_bytes: StepBytes | None = None
    """The bytes of the step of the latest plain call; None before one."""
    planned: weakref.WeakSet[WaitingPlanned] = field(default_factory=weakref.WeakSet)
    plain: weakref.WeakSet[WaitingPlain] = field(default_factory=weakref.WeakSet)
    ending: list[WaitingPlanned] = field(default_factory=list)
    """The planned forwards whose saved values were given to the running backward. Where one has failed, they stay until
    the next forward begins."""
    warned_of_hooks: bool = False
    """Whether it was said that the caller's saved-tensor hooks get what plans save."""
    _warned_bytes: int = 0
    """The most bytes that a step needs which went on beyond the budget with a warning."""
    _versions: dict[int, int] | None = None
    """The versions of all parameters at the first call, by the `id` of each; None before it."""

    @property
    def device(self) -> torch.device:
        """The device of the model, also where a parameter is stored on the host."""
        return home_device(self.model)

    @property
    def trained(self) -> bool:
        """Whether a backward of the model has begun before: from then on a `BudgetError` interrupts a training."""
        return bool(self.seen_later)

    @property
    def overlaps(self) -> frozenset[Overlap]:
        """The steps of other models that were seen to run between its forwards and their backwards."""
        return frozenset().union(*self.seen_meanwhile)

    @property
    def stepped(self) -> bool:
        """Whether a parameter has been written to since the model's first call: from then on an error loses training
        progress."""
        now = self._versions_now()
        if all(isinstance(one, nn.Parameter) for one in self.model.parameters()):
            return self._versions != now
        known = self._versions or {}  # `functional_call` has put other tensors in their place
        return any(now.get(key, version) != version for key, version in known.items())

    def _versions_now(self) -> dict[int, int]:
        return {id(one): one._version for one in self.model.parameters() if not one.is_inference()}

    def refuse(self, refused: BudgetError) -> None:
        """Raise `refused`, or warn of it in a model that has stepped, whose training an error would end: the next
        forward is planned with what is there now, or refused where no plan has room for it."""
        if self.stepped:
            self.warn_beyond(refused)
            return
        try:
            raise refused
        finally:
            del refused  # else this frame and the error would hold each other

    def warn_beyond(self, refused: BudgetError) -> None:
        """Warn that a step goes on beyond the budget, instead of raising `refused`. After the first warning, only steps
        that need clearly more than those warned of cause another."""
        if refused.smallest_bytes >= self._warned_bytes + refused.budget_bytes // WORTHWHILE:
            self._warned_bytes = refused.smallest_bytes
            warnings.warn(f"{refused.sentence}; training goes on, and such steps may exceed the budget", stacklevel=2)

    @cached_property
    def tolerance_bytes(self) -> int:
        """The bytes that plans leave free for tensors that appear on the device without being noticed: half of them
        before a forward, the other half before its backward."""
        return max(_LEAST_TOLERANCE, sum(parameter.nbytes for parameter in self.model.parameters()) // _TOLERANCE)

    @property
    def callers_code(self) -> CallersCode:
        """The `CallersCode` around calls of the model as it is now, trained or frozen."""
        return self._callers_code[any(map(attrgetter("requires_grad"), self.model.parameters()))]

    @cached_property
    def notable_bytes(self) -> int:
        """The smallest change in the bytes elsewhere for which they are counted again."""
        return self.tolerance_bytes // 2

    @property
    def trainable_bytes(self) -> int:
        """The bytes of the model's parameters that require gradients now."""
        return distinct_bytes(one for one in self.model.parameters() if one.requires_grad)

    @property
    def optimizer(self) -> Any:
        """The optimizer that plans count, as `Options.optimizer` returns it."""
        return self.given_optimizer.now

    @property
    def has_looked(self) -> bool:
        """Whether it is known which optimizers step the model and which other tensors are on the device."""
        return self.fixed_bytes is not None or bool(self.looks)

    def begin(self, waiting: int) -> None:
        """Note that a forward begins while `waiting` others wait for their backward."""
        self.ending.clear()
        if self._versions is None:
            self._versions = self._versions_now()
        self.groups.begin(waiting)

    def kept_outputs(self, inputs: Iterable[torch.Tensor], device: torch.device) -> int:
        """The bytes of the latest forward's outputs that are still alive, without the model's own tensors and `inputs`.
        0 where these bytes are too few to matter. Also 0 while any forward waits for its backward: what a waiting
        forward holds is counted with its outputs."""
        there = bytes_still_there([one for one in self.latest_outputs if one.device == device])
        if sum(there.values()) <= self.notable_bytes or self.all_waiting():
            return 0
        own = bytes_by_address([*self.model.parameters(), *self.model.buffers(), *inputs], device)
        return sum(nbytes for address, nbytes in there.items() if address not in own)

    @property
    def paths_vary(self) -> bool:
        """Whether forwards were seen to run more or fewer operators than others."""
        return len(self.paths) > 1

    def dropped_outputs(self, plan: Plan) -> int:
        """The bytes of a plan's outputs that will have been freed when its backward begins, judged by earlier
        backwards: outputs that the caller does not keep are freed as soon as a loss outside of the model has been
        differentiated. 0 where more than `notable_bytes` were still alive, or no backward was seen."""
        kept = self.outputs_in_backward
        if kept is None or kept > self.notable_bytes:
            return 0
        return max(0, self.returned_bytes(plan) - kept)

    def returned_bytes(self, plan: Plan) -> int:
        """`planning.derived.returned_bytes` of a plan, cached: the bytes of the outputs of its call."""
        return self.figure("returned", plan, lambda: returned_bytes(plan))

    def to_appear(self, elsewhere: int) -> int:
        """The bytes elsewhere that are expected to appear between a forward and its backward, if `elsewhere` bytes are
        there already when the forward begins."""
        seen = self.later_bytes
        if self.reached_bytes is not None:
            seen = min(seen, max(0, self.reached_bytes - elsewhere))
        return seen + (self.given_bytes or 0)

    def add(self, forward: WaitingPlanned) -> None:
        """Add a planned forward that begins now."""
        self.latest = weakref.ref(forward)
        self._begins(forward, forward.outputs)
        self.planned.add(forward)
        if self.plans.get(id(forward.plan)) is None:
            self.plans[id(forward.plan)] = forward.plan, None

    def add_plain(self, forward: WaitingPlain) -> None:
        """Add a forward that begins now and runs plain."""
        self._begins(forward, forward.outputs)
        self.plain.add(forward)
        lasting = self.budget_bytes - forward.room_bytes - forward.peak_bytes
        # A plan is guessed to hold a quarter of what the plain step holds.
        held, peak = forward.held_bytes, forward.peak_bytes
        self.plain_step_bytes = StepBytes(lasting, held // 4, peak // 4, held, peak)

    def _begins(self, forward: Waiting, outputs: Sequence[WeakStorage]) -> None:
        forward.number = self.number = next(_numbers)
        self.latest_outputs = outputs
        self.gradient_bytes = max(self.gradient_bytes or 0, forward.account.gradients)
        self.state_bytes = max(self.state_bytes or 0, forward.account.optimizer_state)

    def figure(self, name: Hashable, plan: Plan, of: Callable[[], int]) -> int:
        """A number of bytes that depends on a plan, as `of` returns it; cached under `name`, so that `of` is called
        once per plan."""
        if (known := self.figures.get((name, id(plan)))) is None:
            known = self.figures[name, id(plan)] = plan, of()
        return known[1]

    def until_backward(self, tangent_bytes: int) -> int | None:
        """The bytes that the caller's own code was seen to allocate between a forward and its backward, without the
        gradients that the backward begins with (`tangent_bytes`). Scaled up for outputs larger than those seen. None
        where nothing was seen; 0 where the user gave the number of bytes elsewhere (`fixed_bytes`)."""
        if self.fixed_bytes is not None:
            return 0
        seen = self.callers_code
        if seen.meanwhile is None:
            return None
        grown = max(1.0, tangent_bytes / seen.returned_bytes) if seen.returned_bytes else 1.0
        return max(0, int(grown * seen.meanwhile) - tangent_bytes)

    def peak_above_lasting(self, plan: Plan) -> int:
        """`planning.derived.peak_above_lasting` of a plan in bytes, cached: the peak of its step less what stays from
        step to step and what the caller's own code allocates."""
        return self.figure("peak", plan, lambda: peak_above_lasting(plan))

    @property
    def step_bytes(self) -> StepBytes | None:
        """The most bytes, field by field, of the steps by recent plans and of the latest plain step; None if there were
        no such steps. Where gradients exist now and no recent plan counted on gradients from before the step, the peaks
        include the largest gradient once more: the backward computes it before it is added to `.grad`."""
        for number, (plan, needs) in list(self.plans.items()):
            if needs is None:
                self.plans[number] = plan, StepBytes.of(plan)
        found = [needs for _, (_, needs) in self.plans.items() if needs is not None]
        found += [self.plain_step_bytes] if self.plain_step_bytes else []
        if not found:
            return None
        seen = max(code.meanwhile or 0 for code in self._callers_code.values())  # its next step may be of either kind
        most = reduce(StepBytes.covering, found).with_callers_code(seen)
        beside = any(plan.account.gradients_held for _, (plan, _) in self.plans.items())
        added = 0 if beside else max((one.nbytes for one in self.gradients_now()), default=0)
        return replace(most, least_peak=most.least_peak + added, peak=most.peak + added)

    @cached_property
    def _trained(self) -> tuple[nn.Parameter, ...]:
        """The model's parameters that were trainable when this was first read."""
        return tuple(parameter for parameter in self.model.parameters() if parameter.requires_grad)

    @cached_property
    def _expected_state(self) -> int:
        """The bytes of state that the model's optimizer is expected to have, estimated before the first plan."""
        return optimizer_account(self.optimizer, self._trained, self.device.type).state_bytes

    def gradients_expected(self, beside: Entry | None = None) -> int:
        """The bytes of the gradients that the model will have, without parameters that it shares with the model of
        `beside`."""
        own = set(map(id, beside.model.parameters())) if beside else ()
        most = distinct_bytes(parameter for parameter in self._trained if id(parameter) not in own)
        return most if self.gradient_bytes is None else min(most, self.gradient_bytes)

    @cached_property
    def _beside(self) -> tuple[torch.Tensor, ...]:
        own = set(map(id, self.model.parameters()))
        given = parameters_of(self.optimizer) if isinstance(self.optimizer, torch.optim.Optimizer) else ()
        return tuple(one for one in given if one.requires_grad and id(one) not in own)

    def stepped_beside(self) -> tuple[torch.Tensor, ...]:
        """The parameters outside of the model that its optimizer instance also steps, such as those of a loss with
        weights; once the optimizer has stepped, only those with state or a gradient."""
        if not self._beside or not (state := getattr(self.optimizer, "state", None)):
            return self._beside
        return tuple(one for one in self._beside if one in state or one.grad is not None)

    def gradients_now(self, beside: Entry | None = None) -> list[torch.Tensor]:
        """The gradients that the model has now, without those of parameters that it shares with the model of
        `beside`."""
        own = set(map(id, beside.model.parameters())) if beside else ()
        return [one.grad for one in self._trained if one.grad is not None and id(one) not in own]

    def state_expected(self) -> int:
        """The bytes of state that the model's optimizer will hold."""
        return self._expected_state if self.state_bytes is None else self.state_bytes

    def state_now(self) -> list[torch.Tensor]:
        """The state tensors of the model's optimizer, where that optimizer is known."""
        return list(held_tensors(self.optimizer)) if isinstance(self.optimizer, torch.optim.Optimizer) else []

    def state_to_come(self, plan: Plan, returned_bytes: int, elsewhere_bytes: int) -> int:
        """The bytes of optimizer state that a plan counts and that did not exist when the device was last searched. 0
        where the optimizer's step would not fit the budget beside the forward's outputs (`returned_bytes`) and other
        code's tensors (`elsewhere_bytes`). Also 0 on a GPU, and where the plan steps parameters in the backward."""
        account = plan.account
        if account.caching or any(region.steps for region in plan.regions):
            return 0
        in_step = account.optimizer_step_bytes(returned_bytes) - account.elsewhere + elsewhere_bytes
        return max(0, account.optimizer_state - self.found.state) if in_step <= plan.budget_bytes else 0

    def waiting(self) -> list[WaitingPlanned]:
        """The planned forwards whose backward has not run yet, in the order in which they began."""
        if not self.planned:  # iterating takes longer than this
            return []
        return sorted([forward for forward in self.planned if not forward.done], key=attrgetter("number"))

    def plain_waiting(self) -> list[WaitingPlain]:
        """The forwards that ran without a plan and whose backward has not begun yet."""
        return list(self.plain) if self.plain else []

    def all_waiting(self) -> list[Waiting]:
        """The forwards, planned or not, that wait for their backward."""
        return [*self.waiting(), *self.plain] if self.planned or self.plain else []

    def in_backward(self) -> list[WaitingPlanned]:
        """The planned forwards that the running backward has reached."""
        return [forward for forward in self.planned if forward.is_in_backward()]

    @property
    def held_bytes(self) -> int:
        """The bytes held by forwards, planned or not, that wait for their backward."""
        return sum([forward.held_bytes for forward in self.all_waiting()])

    @property
    def plain_held_bytes(self) -> int:
        """The bytes held by forwards that ran without a plan and wait for their backward."""
        return sum([forward.held_bytes for forward in self.plain]) if self.plain else 0

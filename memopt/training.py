"""Runs a model's training calls as planned: plans each new situation, refuses what would not fit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memopt.budget.account import Account, account_of, distinct_bytes
from memopt.capture.ahead import capture
from memopt.capture.data_sizes import DataSizes, SizeOutgrown, is_real, match, new_symbols, observe
from memopt.capture.dynamo import loss_call
from memopt.capture.inputs import Call, check_device, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.captured import Captured
from memopt.climb import Climb
from memopt.emit.gradients import Accumulation, is_hooked
from memopt.errors import BudgetError, CaptureError
from memopt.levers import Rung, ladder
from memopt.options import Options
from memopt.pending import PendingForward, PendingForwards
from memopt.plan import Plan
from memopt.precision import DecidePrecision, check_rules, precision_rewriting
from memopt.pricing import Hardware, hardware, hardware_of, measure_hardware
from memopt.progress import stage
from memopt.proposals import OPTIMIZER_PROPOSALS, Offer, TrainingFacts, offers
from memopt.situation import Situation, State, TooTight
from memopt.torch_compat import without_autocast
from memopt.training_state import TrainingState, generator_states, set_generators

LOSS_OUTSIDE = (
    "the loss is computed outside of the model: what that holds is not planned; give optimize the loss_fn, or have the "
    "model return its loss"
)


class TrainingCalls:
    """The planned training calls of one model.

    Each situation (are gradients held, what do forwards in waiting hold, what is hooked) has plans of its own, and
    within it Dynamo keeps one compilation for every set of shapes.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        own_call: Callable[..., Any] | None,
    ) -> None:
        self.model, self.options, self.loss_fn, self.own_call = model, options, loss_fn, own_call
        self.pending = PendingForwards()
        self.accumulation = Accumulation()
        self.situations: dict[State, Situation] = {}
        self.known: dict[tuple[Any, ...], Captured] = {}
        """What was captured, by its regions and notes: another budget or situation prices nothing anew."""
        self.data_sizes: dict[str, DataSizes] = {}
        """Sizes that depend on data, by the fingerprint of the region that they are of."""
        self.latest: Plan | None = None
        self.offer: Offer | None = None
        """Proposals about the optimiser that were pulled: every plan counts on them."""
        self.unplanned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.unplanned:
            return self.plain(*args, **kwargs)
        check_device((args, kwargs), self.model)
        waiting = self.pending.waiting()
        self._check_waiting(waiting)
        self.accumulation.allowed = not waiting
        others = sum(forward.held_bytes for forward in waiting)
        try:
            with self._types():
                state = self._state()
                self._screen((args, kwargs), replace(state, other_forwards=others))
                return self._run((args, kwargs), state, others)
        except CaptureError:
            if "plain" not in self.options.allow:
                raise
            self.unplanned = True
            return self.plain(*args, **kwargs)

    def _run(self, call: Call, state: State, others: int) -> Any:
        generators = generator_states(self.device())
        try:
            return self._situation(state).run(call, others)
        except TooTight:
            return self._run(call, replace(state, other_forwards=others), others)
        except SizeOutgrown:
            # A forward writes to buffers only at its end, so that the generators are all there is to undo.
            set_generators(generators, self.device())
            self.situations.clear()
            self.known.clear()
            return self._run(call, state, others)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The call of the plain model."""
        run: Any = self.own_call or self.model._call_impl
        return loss_call(run, self.loss_fn)(*args, **kwargs)

    def _state(self) -> State:
        parameters = list(self.model.parameters())
        return State(
            gradients_held=any(parameter.grad is not None for parameter in parameters),
            hooked=frozenset(id(parameter) for parameter in parameters if is_hooked(parameter)),
        )

    def _situation(self, state: State) -> Situation:
        if state not in self.situations:
            self.situations[state] = Situation(self, state)
        return self.situations[state]

    def _check_waiting(self, waiting: Sequence[PendingForward]) -> None:
        """Forwards in waiting were not planned for the gradients that this call's backward will leave."""
        gradients = distinct_bytes(parameter for parameter in self.model.parameters() if parameter.requires_grad)
        for forward in waiting:
            planned = forward.plan
            if planned.ceiling_bytes + gradients > planned.budget_bytes:
                reason = "a second forward before the first one's backward"
                raise BudgetError(planned.budget_bytes, forward.roomy_bytes(), reason, least=False)

    def begin(self, plan: Plan, state: State) -> PendingForward:
        """A forward begins that runs as planned."""
        self.latest = plan
        held = plan.held_bytes + plan.account.between_regions
        forward = PendingForward(
            plan, weakref.ref(self.model), state.hooked, self.pending, self.accumulation, held_bytes=held
        )
        self.pending.add(forward)
        return forward

    def device(self) -> torch.device:
        """Where the model is, or, for one on "meta", where it would run here: tracing must see a device with kernels,
        since "meta" picks other attention kernels and lacks some gradients."""
        home = next(self.model.parameters()).device
        if home.type != "meta":
            return home
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def account(self, call: Call, state: State) -> Account:
        device = torch.device("cpu" if self.card.name == "cpu" else "cuda")
        account = account_of(self.model, tensors_in(call), self.options.optimizer, device)
        account = replace(account, gradients_held=state.gradients_held, other_forwards=state.other_forwards)
        return account if self.offer is None else self.offer.adjusted(account)

    def climb(self) -> Climb:
        """What weighs plans with different levers against each other."""
        allowed = frozenset(OPTIMIZER_PROPOSALS) & self.options.allow if self.offer is None else frozenset()
        return Climb(self.options.budget_bytes, self.options.effort, allowed, self._offers)

    def _offers(self) -> tuple[Offer, ...]:
        """Proposals that may still be pulled. To the host's memory of a CPU there is nothing to move."""
        here = {"offload_optimizer"} if self.card.name == "cpu" else set()
        names = set(OPTIMIZER_PROPOSALS) - here if self.offer is None else set()
        return offers(self.facts, names)

    @property
    def facts(self) -> TrainingFacts:
        """What the optimiser trains, on which device."""
        return TrainingFacts.of(self.model, self.options.optimizer, self.card)

    def plan_ahead(self, call: Call, state: State | None = None, *, gradients_held: bool = False) -> Plan:
        """Capture and plan a call ahead of its first run, on fakes. Raises `BudgetError`, `CaptureError`."""
        state = state or replace(self._state(), gradients_held=gradients_held)
        climb = self.climb()
        with self._types():
            self._screen(call, state)
            capture = self._capture(call, state)
            for rung in self.rungs:
                try:
                    captured, account = capture(rung.rewriting)
                except NothingToRewrite as nothing:
                    climb.skip(nothing.notes)
                    continue
                plan = climb.weigh(rung, captured, account)
                if plan is not None:
                    return plan
        return climb.best()[0]

    def _capture(self, call: Call, state: State) -> Callable[[Rewriting], tuple[Captured, Account]]:
        """What captures a call on fakes with one rewriting or another, and accounts for it. Raises `CaptureError`."""
        with stage("capturing"):
            traced = capture(
                self.model, call, self.loss_fn, self.device(), state.hooked, differentiate_all=self.differentiate_all
            )

        def captured(rewriting: Rewriting) -> tuple[Captured, Account]:
            with stage("tracing"):
                found = traced(rewriting)
            account = replace(self.account(call, state), between_regions=found.between_bytes)
            return self.remember(found.regions, call, rewriting, found.notes), account

        return captured

    def _screen(self, call: Call, state: State) -> None:
        """Have the decider of precision see the values of a call, once for calls like it, where it asks for them."""
        for decide in self.rewriting.deciders:
            if isinstance(decide, DecidePrecision) and decide.screenings is not None and not decide.left_to_autocast:
                here = self.options.hardware is None  # the budget is another device's if one was named
                room = self.options.budget_bytes - self.account(call, state).resident_bytes if here else None
                decide.screenings.look(
                    self.model,
                    call,
                    self.loss_fn,
                    [rung.rewriting for rung in self.rungs],
                    room_bytes=room,
                    differentiate_all=self.differentiate_all,
                )

    def remember(
        self, regions: tuple[JointGraph, ...], call: Call, rewriting: Rewriting, notes: tuple[str, ...] = ()
    ) -> Captured:
        """The regions as something to plan; the same object as before if they were captured before."""
        found = (region.operators.notes if region.operators else () for region in regions)
        key = (*((region.fingerprint, region.parameter_inputs) for region in regions), *notes, *found)
        if key not in self.known:
            check_rules(self.model, [region.operators for region in regions if region.operators])
            sizes = DataSizes()
            if len(regions) == 1:
                sizes = self._sizes(regions[0], call)
                notes += (LOSS_OUTSIDE,) * regions[0].ends_before_loss
            self.known[key] = Captured(
                type(self.model).__name__,
                regions,
                self.card,
                notes,
                sizes,
                self.options.calibrate,
                rewriting,
                "recompute" in self.options.allow,
            )
        return self.known[key]

    def _sizes(self, region: JointGraph, call: Call) -> DataSizes:
        """Sizes that depend on data: seen by running the call's forward without gradients; unknown for fakes."""
        depends = any(True for _ in new_symbols(region.module.graph))
        if not depends or not all(map(is_real, (*self.model.parameters(), *tensors_in(call)))):
            return DataSizes()
        state = TrainingState.of(self.model)
        observed = observe(lambda: self.plain(*call[0], **call[1]))
        state.undo_forward()
        seen = match(region.module.graph, observed)
        if seen is not None:
            self.data_sizes[region.fingerprint] = DataSizes.of(seen, self.data_sizes.get(region.fingerprint))
        return self.data_sizes.get(region.fingerprint, DataSizes())

    @cached_property
    def card(self) -> Hardware:
        """What the step is planned for: the card that was named, or the device at hand."""
        if self.options.calibrate:
            with stage("timing the device"):
                return measure_hardware(self.device())
        return hardware(self.options.hardware) if self.options.hardware else hardware_of(self.device())

    @cached_property
    def rewriting(self) -> Rewriting:
        """What is done to each region's operator graph."""
        return precision_rewriting(self.options.precision, self.card)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """What is done to them with more and more levers pulled."""
        return ladder(self.rewriting, self.options.allow, drop_logits=self.options.outputs == "loss_only")

    def _types(self) -> AbstractContextManager[None]:
        """The caller's autocast is off in the model where the plan has types of its own."""
        return without_autocast() if self.rewriting.replaces_autocast else nullcontext()

    @property
    def differentiate_all(self) -> bool:
        return self.options.outputs == "all"

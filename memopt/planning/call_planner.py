"""Plans the training calls of one model: captures them with more and more levers pulled, and accounts for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from memopt.account.account import Account, account_of
from memopt.capture.ahead import Capture, capture
from memopt.capture.data_sizes import DataSizes, is_real, match, new_symbols, observe
from memopt.capture.fake_model import Narrowed
from memopt.capture.inputs import Call, on_meta, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.compat import without_autocast
from memopt.device import Hardware, calibrated_hardware, hardware, hardware_of
from memopt.emit import Lowering, lowering_for
from memopt.errors import CaptureError
from memopt.optimizers import BF16_PARAMETERS
from memopt.planning import plan_cache
from memopt.planning.advice import Advice
from memopt.planning.captured import Captured
from memopt.planning.climb import Climb, Step
from memopt.planning.footprint import Footprint
from memopt.planning.job_key import Job
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept
from memopt.planning.proposing import Proposing
from memopt.progress import stage
from memopt.rewrite import REINPLACE, Rung, ladder, offload_link
from memopt.rewrite.precision import DecidePrecision, check_rules, precision_rewriting
from memopt.training_state import TrainingState
from passes.ops.fp8_history import forget, new_prefix

if TYPE_CHECKING:
    from memopt.planning.state import State

_Capture: TypeAlias = Callable[[Rewriting], tuple[Captured, Account]]

LOSS_OUTSIDE = (
    "the loss is computed outside of the model: what that holds is not planned; give optimize the loss_fn, or have the "
    "model return its loss"
)

NOT_FUSED = (
    "a forward that breaks into regions, or has sizes that depend on data, runs as plain operators and not through "
    "inductor"
)


class CallPlanner:
    """What is known of a model's training calls before they run; `plain` is the call of the plain model."""

    def __init__(
        self, model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None, plain: Callable[..., Any]
    ) -> None:
        self.model, self.options, self.loss_fn, self.plain = model, options, loss_fn, plain
        self.known: dict[tuple[Any, ...], Captured] = {}
        """What was captured, by its regions and notes: another budget or situation prices nothing anew."""
        self.data_sizes: dict[str, DataSizes] = {}
        """Sizes that depend on data, by the fingerprint of the region that they are of."""
        self.histories = new_prefix()
        """What names of magnitudes begin with that 8-bit layers remember."""
        weakref.finalize(self, forget, self.histories)

    def device(self) -> torch.device:
        """Where the model is, or, for one on "meta", where it would run here: tracing must see a device with kernels,
        since "meta" picks other attention kernels and lacks some gradients."""
        home = next(self.model.parameters()).device
        if home.type != "meta":
            return home
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def lowering(self) -> Lowering:
        """What makes planned graphs callable."""
        return lowering_for(self.options.backend, self.device())

    def account(self, call: Call, state: State) -> Account:
        account = account_of(self.model, tensors_in(call), self.options.optimizer, self.card)
        account = replace(account, gradients_held=state.gradients_held, other_forwards=state.other_forwards)
        return self.proposing.adjusted(account)

    def climb(self, state: State, *, advise: bool = True) -> Climb:
        """What weighs plans with different levers against each other; `advise`: and names what is not allowed."""
        proposing = self.proposing
        offers = proposing.offers if advise else proposing.offers_allowed
        offered = partial(offers, gradients_held=state.gradients_held)
        return Climb(self.options.budget_bytes, self.options.effort, proposing.allowed, offered, notes=proposing.notes)

    @cached_property
    def proposing(self) -> Proposing:
        """Which proposals there are, and which was pulled."""
        return Proposing(self.model, self.options, self.card, self.rewriting.autocast, self.lowering.fuses)

    def plan_ahead(self, call: Call, state: State, *, advise: bool = True) -> Plan:
        """Capture and plan a call ahead of its first run, on fakes.

        Raises `BudgetError`, with what else would help if `advise`, and `CaptureError`.
        """
        self.proposing.check_allowed()
        climb = self.climb(state, advise=advise)
        climb.narrowed = self._on_narrow_parameters(call, state)
        if advise:
            climb.advice = Advice(self, call, state)
        with self.types():
            self.screen(call, state)
            job = self.job(call, state)
            sketch = job.sketch() if job else None
            if kept := plan_cache.find_by(sketch):
                return kept.live(self._later(kept, call, state))
            traced, capture = self._capture(call, state, self.proposing.narrowed)
            key = job.key(traced.graph) if job and traced.graph else None
            plan_cache.note(sketch, key)
            if kept := plan_cache.find(key):
                return kept.live(self._later(kept, call, state))
            for rung in self.rungs:
                try:
                    captured, account = capture(rung.rewriting)
                except NothingToRewrite as nothing:
                    climb.skip(rung, nothing.notes)
                    continue
                plan = climb.weigh(rung, captured, account)
                if plan is not None:
                    break
            else:
                plan = climb.best()[0]
            self.keep(key, plan)
            return plan

    def _later(self, kept: Kept, call: Call, state: State) -> Callable[[], Captured]:
        """What captures and traces the graphs that a kept plan is for, once."""
        hollow = on_meta(call)

        @cache
        def captured() -> Captured:
            narrows = BF16_PARAMETERS in kept.plan.proposals
            with self.types():
                _, trace = self._capture(hollow, state, self.proposing.narrowing() if narrows else None)
                found = trace(self.rungs[kept.rung].rewriting)[0]
            return self.proposing.as_kept(found, kept.plan)

        return captured

    def job(self, call: Call, state: State) -> Job | None:
        """What plans for a call are kept by; None where they are not kept."""
        if not (self.options.kept and plan_cache.is_on()):
            return None
        pulled = self.proposing.pulled.names if self.proposing.pulled else ()
        further = type(self.lowering).__name__, pulled, sorted(self.proposing.allowed)
        return Job(self.model, call, state, self.options, self.card, self.loss_fn, further)

    def keep(self, key: str | None, plan: Plan, footprint: Footprint | None = None) -> None:
        """Keep a plan on disk for the next start, unless sizes that depend on data are planned by what was seen."""
        captured = plan.captured
        assert captured is not None
        rungs = [rung.rewriting for rung in self.rungs]
        if captured.data_sizes == DataSizes() and captured.rewriting in rungs:
            plan_cache.keep(key, Kept(plan, rungs.index(captured.rewriting), footprint))

    def _on_narrow_parameters(self, call: Call, state: State) -> Callable[[Rung], Step | None]:
        """What gives the call on a rung as it will be once the parameters are in bf16; None where its code cannot mix
        the dtypes that it then meets."""
        captures: list[_Capture] = []

        def step(rung: Rung) -> Step | None:
            with suppress(NothingToRewrite, CaptureError):
                if not captures:
                    captures.append(self._capture(call, state, self.proposing.narrowing())[1])
                return (rung, *captures[0](rung.rewriting))
            return None

        return step

    def _capture(self, call: Call, state: State, narrowed: Narrowed | None) -> tuple[Capture, _Capture]:
        """A call captured on fakes, and what traces it with one rewriting or another, and accounts for it.

        Raises `CaptureError`.
        """
        with stage("capturing"):
            traced = capture(
                self.model,
                call,
                self.loss_fn,
                self.device(),
                state.hooked,
                differentiate_all=self.differentiate_all,
                narrowed=narrowed,
                lowering=self.lowering,
            )
        account = self.account(call, state)

        def captured(rewriting: Rewriting) -> tuple[Captured, Account]:
            with stage("tracing"):
                found = traced.trace(rewriting)
            held = replace(account, between_regions=found.between_bytes)
            return self.remember(found.regions, call, rewriting, found.notes), held

        return traced, captured

    def screen(self, call: Call, state: State) -> None:
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
            if self.lowering.fuses and not all(region.fused for region in regions):
                notes += (NOT_FUSED,)
            self.known[key] = Captured(
                type(self.model).__name__,
                regions,
                self.card,
                notes,
                sizes,
                self.options.calibrate,
                rewriting,
                "recompute" in self.options.allow,
                offload_link(self.card, self.options.allow),
            )
        return self.known[key].stepping_by(self.proposing.stepping)

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
                return calibrated_hardware(self.device())
        return hardware(self.options.hardware) if self.options.hardware else hardware_of(self.device())

    @cached_property
    def rewriting(self) -> Rewriting:
        """What is done to each region's operator graph."""
        by_types = precision_rewriting(self.options.precision, self.card)
        return replace(by_types, reinplace=REINPLACE in self.options.allow)

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """What is done to them with more and more levers pulled."""
        drop_logits = self.options.outputs == "loss_only"
        return ladder(
            self.rewriting, self.options.allow, drop_logits=drop_logits, card=self.card, histories=self.histories
        )

    def types(self) -> AbstractContextManager[None]:
        """The caller's autocast is off in the model where the plan has types of its own."""
        return without_autocast() if self.rewriting.replaces_autocast else nullcontext()

    @property
    def differentiate_all(self) -> bool:
        return self.options.outputs == "all"

"""Plans the training calls of a model in three stages: rewrite, price, solve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from memopt.account.account import Account, account_of, in_blocks
from memopt.account.elsewhere import Around, Elsewhere, in_steps
from memopt.capture.data_sizes import DataSizes, is_real, match, new_symbols, observe
from memopt.capture.departures import departures
from memopt.capture.fake_model import Narrowed
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.on_fakes import capture_on_fakes
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.capture.rehearsal import cannot_capture
from memopt.capture.trace import accumulating, trace_call
from memopt.compat.dispatch import without_autocast
from memopt.device import Hardware, calibrated_hardware, hardware, hardware_of
from memopt.errors import CaptureError
from memopt.planning.captured import Captured
from memopt.planning.job_key import Job
from memopt.planning.options import Options, backend_for
from memopt.planning.plan import Plan
from memopt.planning.plan_search import Candidate, PlanSearch
from memopt.planning.proposing import Proposing
from memopt.planning.situation import Buckets, Situation
from memopt.progress import stage
from memopt.recent import Recent
from memopt.rewrite import FP8_LEVERS, REINPLACE, LeverSet, lever_sets, offload_link
from memopt.rewrite.precision import DecidePrecision, check_rules, precision_rewriting
from memopt.rewrite.precision.screenings import Screenings
from memopt.rewrite.user_passes import with_passes
from passes.ops.fp8_history import histories_of

LOSS_OUTSIDE = (
    "the loss is computed outside of the model: the memory that it takes is not planned; give optimize the loss_fn, or "
    "have the model return its loss"
)

NOT_FUSED = (
    "a forward that breaks into regions, or has sizes that depend on data, runs as plain operators and not through "
    "inductor"
)

_MOST_STEPS = 24
"""The number of traced steps that are kept: each holds the graphs of one capture under one lever set."""


class CallPlanner:
    """Plans the training calls of one model; `plain` runs the plain model's forward."""

    def __init__(
        self, model: nn.Module, options: Options, loss_fn: Callable[..., Any] | None, plain: Callable[..., Any]
    ) -> None:
        self.model, self.options, self.loss_fn, self.plain = model, options, loss_fn, plain
        self._traces: Recent[tuple[tuple[RecordedRegion, ...], int], tuple[JointGraph, ...]] = Recent(_MOST_STEPS)
        """Joint graphs, by the regions of a captured call and the number of the lever set."""
        self._steps: Recent[tuple[Any, ...], tuple[CapturedCall, Captured]] = Recent(_MOST_STEPS)
        """Priced steps, by the `id` of a captured call, the number of the lever set and the parameters with hooks.
        Other situations share them."""
        self._data_sizes: Recent[str, DataSizes] = Recent(_MOST_STEPS)
        """Data-dependent sizes, by the fingerprint of their region."""
        self.around: Callable[[Call], Around] = lambda call: Around(tuple(tensors_in(call)))
        """What belongs to a call, as `elsewhere` is to know it."""
        self.histories = histories_of(model).prefix
        """The prefix of the names of the scale histories that the model's 8-bit layers keep."""

    def candidates(
        self,
        captured: CapturedCall,
        call: Call,
        situation: Situation,
        search: PlanSearch,
        *,
        lowering_bytes: int = 0,
    ) -> Iterator[Candidate]:
        """A captured call rewritten and priced under lever sets with more and more levers, each when it is asked for.

        Sets whose newest lever finds nothing to rewrite are reported to `search`. `lowering_bytes` are the bytes that
        compiled code holds beyond its plan. Raises `CaptureError`.
        """
        account = self.account(call, situation)
        account = replace(
            account,
            inputs=max(account.inputs, in_blocks(captured.input_bytes, self.card)),
            lowering=lowering_bytes,
            between_regions=captured.between_bytes,
        )
        if situation.buckets is not None and situation.buckets.clone_outputs:
            account = replace(account, output_clones=captured.output_bytes)
        if self.options.passes:
            search.note_row(self.bare, self.rewrite_and_price(captured, call, situation, self.bare), account)
        for levers in self.lever_sets:
            try:
                yield levers, self.rewrite_and_price(captured, call, situation, levers), account
            except NothingToRewrite as nothing:
                search.skip(levers, nothing.notes)

    def rewrite_and_price(self, captured: CapturedCall, call: Call, situation: Situation, levers: LeverSet) -> Captured:
        """The captured call under a lever set: rewritten, differentiated, and priced for the card.

        Raises `CaptureError`, and `NothingToRewrite` where the newest lever finds nothing to rewrite.
        """
        number = self.lever_sets.index(levers) if levers != self.bare else -1
        traced = captured.regions, number
        if traced not in self._traces:
            self._traces[traced] = self._trace(captured, levers.rewriting)
        key = id(captured), number, situation.hooked
        if key not in self._steps:
            joints = accumulating(self._traces[traced], captured, situation.hooked)
            self._steps[key] = captured, self._priced(joints, captured, call, levers.rewriting)
        return self._steps[key][1].stepping_by(self.proposing.stepping)

    def _trace(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[JointGraph, ...]:
        with stage("tracing"):
            try:
                return trace_call(captured, rewriting, self.backend)
            except CaptureError as failure:
                raise CaptureError(cannot_capture(self.model, str(failure))) from failure

    def forget_sizes(self) -> None:
        """Have calls priced again, after a batch whose data-dependent sizes exceed those that were planned for."""
        self._steps.clear()

    def _priced(
        self, joints: tuple[JointGraph, ...], captured: CapturedCall, call: Call, rewriting: Rewriting
    ) -> Captured:
        check_rules(self.model, [joint.operators for joint in joints if joint.operators])
        sizes = captured.sizes
        notes = captured.notes + departures(run.region.graph_module for run in captured.runs)
        if captured.whole:
            sizes |= self._sizes(joints[0], call)
            notes += (LOSS_OUTSIDE,) * joints[0].ends_before_loss
        if self.options.passes:
            notes += (f"passes of your own ran, and memopt does not know what they change: {self.options.passes!r}",)
        if self.fuses and not all(joint.fused for joint in joints):
            notes += (NOT_FUSED,)
        notes += self.options.notes(self.device().type)
        return Captured(
            type(self.model).__name__,
            joints,
            self.card,
            notes,
            sizes,
            self.options.calibrate,
            rewriting,
            "recompute" in self.options.allow,
            offload_link(self.card, self.options.allow),
            solvers=self.options.solvers,
        )

    def _sizes(self, region: JointGraph, call: Call) -> DataSizes:
        """The data-dependent sizes of a region, observed by running the call's forward without gradients; unknown for
        fake tensors."""
        depends = any(True for _ in new_symbols(region.module.graph))
        if not depends or not all(map(is_real, (*self.model.parameters(), *tensors_in(call)))):
            return DataSizes()
        seen = match(region.module.graph, observe(self.model, lambda: self.plain(*call[0], **call[1])))
        if seen is not None:
            self._data_sizes[region.fingerprint] = DataSizes.of(seen, self._data_sizes.get(region.fingerprint))
        return self._data_sizes.get(region.fingerprint) or DataSizes()

    def search(self, situation: Situation, *, advise: bool = True) -> PlanSearch:
        """The search over lever sets for calls in a situation; `advise`: a refusal also names proposals not allowed."""
        proposing = self.proposing
        combinations = proposing.combinations if advise else proposing.allowed_combinations
        proposed = partial(combinations, gradients_held=situation.gradients_held)
        notes = (*self.options.notes(self.device().type), *proposing.notes, *filter(None, [self.elsewhere.note]))
        if self._idle_levers:
            names = " and ".join(map(repr, sorted(self._idle_levers)))
            notes += (f"{names} in allow is not used, since this step is in fp32; give precision='bf16' for it",)
        return PlanSearch(self.options.budget_bytes, self.options.effort, proposing.allowed, proposed, notes=notes)

    def on_narrow_parameters(self, call: Call, situation: Situation) -> Callable[[LeverSet], Candidate | None]:
        """A function that returns the candidate of a lever set for the call with parameters in bf16; None where the
        model's code cannot be captured so."""
        captures: list[CapturedCall] = []

        def step(levers: LeverSet) -> Candidate | None:
            with suppress(NothingToRewrite, CaptureError):
                if not captures:
                    captures.append(self.capture_on_fakes(call, self.proposing.narrowing()))
                captured = self.rewrite_and_price(captures[0], call, situation, levers)
                account = replace(self.account(call, situation), between_regions=captures[0].between_bytes)
                return levers, captured, account
            return None

        return step

    def capture_on_fakes(self, call: Call, narrowed: Narrowed | None) -> CapturedCall:
        """The call captured on fake tensors, with parameters cast as `narrowed` says. Raises `CaptureError`."""
        with stage("capturing"):
            return capture_on_fakes(
                self.model,
                call,
                self.loss_fn,
                self.device(),
                differentiate_all=self.differentiate_all,
                narrowed=narrowed,
            )

    def job(self, call: Call, situation: Situation) -> Job:
        """Everything that the plan of a call depends on, which makes the key that it is kept under."""
        chosen = self.proposing.chosen.names if self.proposing.chosen else ()
        elsewhere = in_steps(self.account(call, situation).elsewhere, self.options.budget_bytes)
        further = self.backend, chosen, sorted(self.proposing.allowed), elsewhere
        return Job(self.model, call, situation, self.options, self.card, self.loss_fn, further)

    @property
    def screens(self) -> bool:
        """Whether precision is decided by the values of a call."""
        return bool(self._screenings)

    @property
    def _screenings(self) -> list[Screenings]:
        deciders = (decide for decide in self.rewriting.deciders if isinstance(decide, DecidePrecision))
        return [
            decide.screenings for decide in deciders if decide.screenings is not None and not decide.left_to_autocast
        ]

    def screen(self, call: Call, situation: Situation) -> None:
        """Show the values of a call to the decider of precision if it needs them, once for calls of the same kind."""
        for screenings in self._screenings:
            here = self.options.hardware is None  # the budget is another device's if one was named
            room = self.options.budget_bytes - self.account(call, situation).resident_bytes if here else None
            screenings.look(
                self.model,
                call,
                self.loss_fn,
                [levers.rewriting for levers in self.lever_sets],
                room_bytes=room,
                differentiate_all=self.differentiate_all,
            )

    def account(self, call: Call, situation: Situation) -> Account:
        """The bytes of the step that no schedule changes."""
        account = account_of(self.model, tensors_in(call), self.options.optimizer, self.card)
        held, others = situation.gradients_held, situation.other_forwards
        account = self.proposing.adjusted(replace(account, gradients_held=held, other_forwards=others))
        if situation.buckets is not None:
            account = _with_buckets(account, situation.buckets)
        elsewhere = situation.elsewhere
        if elsewhere is None:
            elsewhere = self.elsewhere.now(self.around(call)).beside(account.optimizer_state)
            if self.device().type == "cuda":  # the allocator's count has the buckets, Python's tensors have not
                elsewhere = max(0, elsewhere - account.buckets)
        return replace(account, elsewhere=elsewhere)

    def still_fits(self, plan: Plan, call: Call, situation: Situation) -> bool:
        """Whether a plan that was kept on disk fits beside what lies on the device now."""
        now = self.account(call, situation).elsewhere
        return plan.ceiling_bytes - plan.account.elsewhere + now <= self.options.budget_bytes

    @cached_property
    def elsewhere(self) -> Elsewhere:
        """Counts what lies on the model's device; nothing for a plan for another device, unless the user says."""
        options = self.options
        here = options.hardware is None and all(map(is_real, self.model.parameters()))
        fixed_bytes = options.elsewhere_bytes if here or options.elsewhere_bytes is not None else 0
        with_state = options.optimizer is not None
        return Elsewhere(
            self.model, options.budget_bytes, fixed_bytes, with_state=with_state, card_major=self.card.major
        )

    def device(self) -> torch.device:
        """The device of the model; for a model on "meta" the one that would run it here, since tracing on "meta" picks
        other attention kernels and lacks some gradients."""
        home = next(self.model.parameters()).device
        if home.type != "meta":
            return home
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def backend(self) -> str:
        """The backend that runs planned graphs: "aten" or "inductor"."""
        return backend_for(self.options.backend, self.device().type)

    @property
    def fuses(self) -> bool:
        """Whether the backend fuses elementwise operators with their readers, so that values between them take no
        memory."""
        return self.backend == "inductor"

    @cached_property
    def proposing(self) -> Proposing:
        """The optimiser proposals that are possible for the model, and those that were chosen."""
        return Proposing(self.model, self.options, self.card, self.rewriting.autocast, self.fuses)

    @cached_property
    def card(self) -> Hardware:
        """The hardware that the step is planned for: the card that was named, or the device at hand."""
        if self.options.calibrate:
            with stage("timing the device"):
                return calibrated_hardware(self.device())
        return hardware(self.options.hardware) if self.options.hardware else hardware_of(self.device())

    @cached_property
    def rewriting(self) -> Rewriting:
        """The rewriting that every lever set includes: precision, and whether results are written in place."""
        by_types = precision_rewriting(self.options.precision, self.card)
        return replace(by_types, reinplace=REINPLACE in self.options.allow)

    @property
    def bare(self) -> LeverSet:
        """The lever set with no levers and none of the user's passes: the call as captured."""
        return LeverSet((), self.rewriting)

    @property
    def lever_sets(self) -> tuple[LeverSet, ...]:
        """The lever sets to try, each with one lever more, the cheapest first; all of them have the user's passes."""
        allow = self.options.allow - self._idle_levers
        found = lever_sets(self.rewriting, allow, card=self.card, histories=self.histories)
        if not self.options.passes:
            return found
        names = tuple(dict.fromkeys(user_pass.name for user_pass in self.options.passes))
        return tuple(
            replace(
                levers,
                levers=(*names, *levers.levers),
                rewriting=with_passes(levers.rewriting, self.options.passes),
            )
            for levers in found
        )

    @property
    def _idle_levers(self) -> frozenset[str]:
        """The allowed 8-bit levers that have no step in 16 bits, where nobody has asked for a precision."""
        no_low_bits = self.options.precision == "auto" and self.rewriting.autocast is None
        return self.options.allow & frozenset(FP8_LEVERS) if no_low_bits else frozenset()

    def types(self) -> AbstractContextManager[None]:
        """A context in which the caller's autocast is off, if the plan decides dtypes itself."""
        return without_autocast() if self.rewriting.replaces_autocast else nullcontext()

    @property
    def differentiate_all(self) -> bool:
        """Whether all outputs of the model may get gradients, not the loss alone."""
        return self.options.outputs == "all"


def _with_buckets(account: Account, buckets: Buckets) -> Account:
    """The account under `DistributedDataParallel`. Gradients that lie in the buckets are counted there, and as held:
    none is kept elsewhere until the backward's end."""
    exchanged = min(account.gradients, buckets.nbytes) if buckets.views else 0
    if not buckets.hold_gradients:
        return replace(account, buckets=buckets.nbytes, into_buckets=exchanged)
    return replace(account, buckets=buckets.nbytes, gradients=account.gradients - exchanged, gradients_held=True)

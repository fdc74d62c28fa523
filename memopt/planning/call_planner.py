"""Plans the training calls of a model in three stages: rewrite, price, solve."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from memopt.account.account import Account, in_blocks
from memopt.account.elsewhere import in_steps
from memopt.capture.data_sizes import DataSizes, is_real, match, new_symbols, observe
from memopt.capture.departures import BETWEEN_REGIONS, departures
from memopt.capture.fake_model import Narrowed
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.on_fakes import capture_on_fakes
from memopt.capture.operators import NothingToRewrite, Rewriting
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.capture.rehearsal import cannot_capture
from memopt.capture.shards import is_tensor_parallel
from memopt.capture.trace import (
    Traces,
    accumulating,
    eager_of_runs,
    passed_of_runs,
    sizes_of_runs,
    trace_call,
    trained,
)
from memopt.errors import BudgetError, CaptureError
from memopt.levers.offload_activations import offload_link
from memopt.levers.recompute import RECOMPUTE
from memopt.planning.call_accounts import CallAccounts, Looks
from memopt.planning.captured import Captured
from memopt.planning.job_key import Job
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.plan_search import Candidate, PlanSearch
from memopt.planning.sharded_call import ShardedCall
from memopt.planning.situation import Situation
from memopt.progress import say, stage
from memopt.recent import Recent
from memopt.rewrite import DecidePrecision, check_rules
from memopt.rewrite.screenings import Screenings

LOSS_OUTSIDE = (
    "the loss is computed outside of the model: the memory that it takes is not planned; give optimize the loss_fn, or "
    "have the model return its loss"
)

NOT_FUSED = (
    "a forward that breaks into regions, or has sizes that depend on data, runs as plain operators and not through "
    "inductor"
)

CompiledKey: TypeAlias = tuple[tuple[RecordedRegion, ...], Account, frozenset[int]]
"""The regions of a call, its account, and the parameters that other calls reach."""

_MOST_STEPS = 24
"""The number of traced steps that are kept: each holds the graphs of one capture under one lever set."""


class CallPlanner(CallAccounts):
    """Plans the training calls of one model; `plain` runs the plain model's forward."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        plain: Callable[..., Any],
        beside: Looks,
    ) -> None:
        super().__init__(model, options, beside)
        self.loss_fn, self.plain = loss_fn, plain
        self._traces: Recent[tuple[tuple[RecordedRegion, ...], int], tuple[JointGraph, ...]] = Recent(_MOST_STEPS)
        """Joint graphs, by the regions of a captured call and the number of the lever set."""
        self.traces = Traces()
        """The joint graphs of single regions."""
        self._steps: Recent[tuple[Any, ...], tuple[CapturedCall, Captured]] = Recent(_MOST_STEPS)
        """Priced steps, by the `id` of a captured call, the number of the lever set and the parameters with hooks.
        Other situations share them."""
        self.compiled_least: Recent[CompiledKey, tuple[BudgetError, Plan]] = Recent(_MOST_STEPS)
        """The refusals of calls that name what compiled code needs at least, with the smallest plans that it is
        compiled for, by their regions and bare accounts."""
        self._data_sizes: Recent[str, DataSizes] = Recent(_MOST_STEPS)
        """Data-dependent sizes, by the fingerprint of their region."""

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
        if self.options.passes:
            bare = self.rewrite_and_price(captured, call, situation, self.rewriting)
            account = self.captured_account(captured, call, situation, bare, lowering_bytes=lowering_bytes)
            search.note_row(self.rewriting, bare, account)
        lever_sets = self.lever_sets
        for number, levers in enumerate(lever_sets, 1):
            say(f"{levers.levers[-1] if levers.levers else 'no lever'}, {number} of at most {len(lever_sets)}")
            try:
                step = self.rewrite_and_price(captured, call, situation, levers)
            except NothingToRewrite as nothing:
                search.skip(levers, nothing.notes)
                continue
            yield levers, step, self.captured_account(captured, call, situation, step, lowering_bytes=lowering_bytes)

    def captured_account(
        self, captured: CapturedCall, call: Call, situation: Situation, step: Captured, *, lowering_bytes: int = 0
    ) -> Account:
        """The account of a captured call whose priced graphs are those of `step`: with all inputs of its graphs, and
        the clones of outputs that `DistributedDataParallel` makes."""
        reached = trained(step.regions, captured)
        self.reached |= reached
        account = self.account(call, situation, reached=reached)
        account = replace(
            account,
            inputs=max(account.inputs, in_blocks(captured.input_bytes, self.card)),
            lowering=lowering_bytes,
        )
        if situation.buckets is not None and situation.buckets.clone_outputs:
            account = replace(account, output_clones=captured.output_bytes)
        return account

    def rewrite_and_price(
        self, captured: CapturedCall, call: Call, situation: Situation, levers: Rewriting
    ) -> Captured:
        """The captured call under a lever set: rewritten, differentiated, and priced for the card.

        Raises `CaptureError`, and `NothingToRewrite` where the newest lever finds nothing to rewrite.
        """
        number = self.lever_sets.index(levers) if levers != self.rewriting else -1
        traced = captured.regions, number
        if traced not in self._traces:
            self._traces[traced] = self._trace(captured, levers)
        key = id(captured), number, situation.hooked
        if key not in self._steps:
            joints = accumulating(self._traces[traced], captured, situation.hooked)
            self._steps[key] = captured, self._priced(joints, captured, call, levers)
        return self._steps[key][1].stepping_by(self.proposing.stepping)

    def _trace(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[JointGraph, ...]:
        with stage("tracing"):
            try:
                return trace_call(captured, rewriting, self.backend, None if captured.whole else self.traces)
            except CaptureError as failure:
                raise CaptureError(cannot_capture(self.model, str(failure))) from failure
            finally:
                gc.collect(1)  # tracing leaves cycles, between which the graphs would lie scattered

    def share_graphs(self, earlier: CallPlanner) -> None:
        """Use the graphs that an earlier planner of the model traced and priced, whose options differ in the budget
        alone."""
        self._traces, self.traces, self._steps = earlier._traces, earlier.traces, earlier._steps
        self._data_sizes, self.compiled_least = earlier._data_sizes, earlier.compiled_least
        self.differentiate_all = earlier.differentiate_all
        self.forget_solvers()  # what they found for another budget would make plans depend on what was asked before

    def forget_solvers(self) -> None:
        """Free the solvers of all calls, once one of them is planned: they take more memory than its graphs."""
        for _, (_, step) in self._steps.items():
            step.forget_solvers()

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
        if len(joints) > 1:
            notes += (BETWEEN_REGIONS,)
        if self.options.passes:
            notes += (f"passes of your own ran, and memopt does not know what they change: {self.options.passes!r}",)
        if self.fuses and not all(joint.fused for joint in joints):
            notes += (NOT_FUSED,)
        notes += self.options.cluster.notes() if self.options.cluster else ()
        notes += self.options.notes(self.device().type)
        return Captured(
            type(self.model).__name__,
            joints,
            self.card,
            notes,
            sizes,
            self.options.calibrate,
            rewriting,
            RECOMPUTE.name in self.options.allow,
            offload_link(self.card, self.options.allow),
            solvers=self.options.solvers,
            run_sizes=() if captured.whole else sizes_of_runs(joints, captured),
            eager=() if captured.whole else eager_of_runs(joints, captured),
            passed=() if captured.whole else passed_of_runs(joints, captured),
            sharded=self._sharded(captured),
            kept=captured.kept,
        )

    def _sharded(self, captured: CapturedCall) -> ShardedCall | None:
        """The sharding of a call's parameters over the cluster that is planned for; None for one card."""
        if self.sharding is None:
            return None
        if not captured.whole:
            raise CaptureError(
                f"mesh needs a forward that is one graph; this one breaks, since {captured.break_reason}"
            )
        return ShardedCall.of(self.sharding, captured.runs[0].parameter_ids)

    def _sizes(self, region: JointGraph, call: Call) -> DataSizes:
        """The data-dependent sizes of a region, observed by running the call's forward without gradients; unknown for
        fake tensors."""
        depends = any(True for _ in new_symbols(region.module.graph))
        if not depends or not all(map(is_real, (*self.model.parameters(), *tensors_in(call)))):
            return DataSizes()
        seen = match(region.module.graph, observe(self.model, call, self.plain))
        if seen is not None:
            self._data_sizes[region.fingerprint] = DataSizes.of(seen, self._data_sizes.get(region.fingerprint))
        return self._data_sizes.get(region.fingerprint) or DataSizes()

    def search(self, situation: Situation, *, advise: bool = True) -> PlanSearch:
        """The search over lever sets for calls in a situation; `advise`: a refusal also names proposals not allowed."""
        proposing = self.proposing
        combinations = proposing.combinations if advise else proposing.allowed_combinations
        proposed = partial(combinations, gradients_held=situation.gradients_held)
        notes = (*self.options.notes(self.device().type), *proposing.notes, *filter(None, [self.beside.note]))
        if self.idle_levers:
            names = " and ".join(map(repr, sorted(self.idle_levers)))
            notes += (f"{names} in allow is not used, since this step is in fp32; give precision='bf16' for it",)
        return PlanSearch(self.options.budget_bytes, self.options.effort, proposing.allowed, proposed, notes=notes)

    def on_narrow_parameters(self, call: Call, situation: Situation) -> Callable[[Rewriting], Candidate | None]:
        """A function that returns the candidate of a lever set for the call with parameters in bf16; None where the
        model's code cannot be captured so."""
        captures: list[CapturedCall] = []

        def step(levers: Rewriting) -> Candidate | None:
            with suppress(NothingToRewrite, CaptureError):
                if not captures:
                    captures.append(self.capture_on_fakes(call, self.proposing.narrowing()))
                captured = self.rewrite_and_price(captures[0], call, situation, levers)
                return levers, captured, self.account(call, situation)
            return None

        return step

    def capture_on_fakes(self, call: Call, narrowed: Narrowed | None) -> CapturedCall:
        """The call captured on fake tensors, with parameters cast as `narrowed` says. Raises `CaptureError`."""
        if self.sharding is not None:
            narrowed = Narrowed(self.sharding.dtype, frozenset())
        if is_tensor_parallel(self.model):
            raise CaptureError(
                f"{type(self.model).__name__} is split by parallelize_module, and captured on values only; give inputs "
                "with values, on the model's device"
            )
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
        live = self.live_optimizer.departure(self.model.parameters()) if self.live_optimizer else ""
        further = self.backend, chosen, sorted(self.proposing.allowed), elsewhere, live
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
                self.lever_sets,
                room_bytes=room,
                differentiate_all=self.differentiate_all,
            )

"""Traces the training calls of one model under the levers that its plans may use."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed import is_available, is_initialized

from memopt.account.account import Account
from memopt.account.elsewhere import in_steps
from memopt.account.sharded import Sharding
from memopt.capture.captured_call import CapturedCall
from memopt.capture.data_sizes import DataSizes, Observed, is_real, match, new_symbols, observe
from memopt.capture.dry_run import cannot_capture
from memopt.capture.dynamo_graph import BETWEEN_REGIONS, departures, is_tensor_parallel
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.joint import JointGraph, accumulating, autocast_to, eager_of_runs, passed_of_runs, sizes_of_runs
from memopt.capture.on_fakes import ParameterCast, capture_on_fakes
from memopt.capture.operators import Rewriting
from memopt.capture.region import RecordedRegion
from memopt.compat.tensors import is_wrapper, special_kind, storage_key
from memopt.errors import BudgetError, CaptureError
from memopt.levers.all import OFFLOAD_ACTIVATIONS, OFFLOAD_PARAMETERS, RECOMPUTE, offload_link
from memopt.levers.precision import DecidePrecision, check_rules
from memopt.lru import LruCache
from memopt.planning.call_accounts import CallAccounts, Looks, OptimizerChoice
from memopt.planning.job_key import PlanJob
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.priced_step import PriceSettings, TracedStep
from memopt.planning.terms import ModelTerms, Situation
from memopt.progress import stage
from memopt.rewrite.screen import Screenings
from memopt.rewrite.trace import MOST_TRACES, Traces, trace_call

LOSS_OUTSIDE = (
    "the loss is computed outside of the model: the memory that it takes is not planned; give optimize the loss_fn, or "
    "have the model return its loss"
)

NOT_FUSED = (
    "not compiled by inductor, but run as plain operators: graphs with data-dependent sizes; where the forward breaks "
    "into regions, also regions whose sizes change, and in a process group all regions"
)

CompiledKey: TypeAlias = tuple[tuple[RecordedRegion, ...], Account, frozenset[int]]
"""The regions of a call, its account without the bytes elsewhere, and the `id`s of parameters of other calls."""

_MOST_STEPS = 24
"""The number of traced steps that are kept: each holds the graphs of one capture under one lever set."""


class CallPlanner:
    """Captures, rewrites and differentiates a model's training calls to plan them; `plain` runs its forward."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        plain: Callable[..., Any],
        beside: Looks,
    ) -> None:
        self.terms = ModelTerms(model, options)
        self.optimizer_choice = OptimizerChoice(self.terms)
        """The optimizer proposals that are possible for the model, and those that were chosen."""
        self.accounts = CallAccounts(self.terms, self.optimizer_choice, beside)
        self.loss_fn, self.plain = loss_fn, plain
        self.differentiate_all = options.outputs == "all"
        """Whether all outputs of the model may get gradients, not the loss alone."""
        self._traces: LruCache[tuple[tuple[RecordedRegion, ...], int], tuple[JointGraph, ...]] = LruCache(_MOST_STEPS)
        """Joint graphs, by the regions of a captured call and the number of the lever set."""
        self.traces: Traces = LruCache(MOST_TRACES)
        """The joint graphs of single regions."""
        self._steps: LruCache[tuple[Any, ...], tuple[CapturedCall, TracedStep]] = LruCache(_MOST_STEPS)
        """Traced steps, by the `id` of a captured call, the number of the lever set and the parameters with hooks."""
        self.compiled_least: LruCache[CompiledKey, tuple[Account, BudgetError, Plan]] = LruCache(_MOST_STEPS)
        """Refusals for compiled code, each with its account and the plan that was compiled, by `CompiledKey`."""
        self._data_sizes: LruCache[str, DataSizes] = LruCache(_MOST_STEPS)
        """Data-dependent sizes, by the fingerprint of their region."""

    def differentiate_outputs(self) -> None:
        """From the next call on, differentiate all outputs, since one other than the loss has received a gradient."""
        self.differentiate_all = True

    @property
    def price_settings(self) -> PriceSettings:
        """The settings by which graphs are priced, but for what depends on a call's account (`PriceSettings.under`)."""
        options, card = self.terms.options, self.terms.card
        return PriceSettings(
            card,
            timed=options.calibrate,
            recompute=RECOMPUTE.name in options.allow,
            link=(link := offload_link(card, options.allow)),
            activations=OFFLOAD_ACTIVATIONS.name in options.allow,
            frozen=self._frozen if link is not None and OFFLOAD_PARAMETERS.name in options.allow else frozenset(),
            solvers=options.solvers,
            stepping=self.optimizer_choice.stepping,
        )

    @property
    def _frozen(self) -> frozenset[int]:
        """The `id`s of the parameters that are not trained and share their memory with no other parameter or buffer.
        Empty in a process group, whose ranks exchange parameters, and where values of a call decide its precision."""
        if self.screens or self.terms.sharding is not None or (is_available() and is_initialized()):
            return frozenset()
        tensors = [*self.terms.model.parameters(), *self.terms.model.buffers()]
        shared = Counter(storage_key(one) for one in tensors if not (is_wrapper(one) or special_kind(one)))
        return frozenset(
            id(one)
            for one in self.terms.model.parameters()
            if not (one.requires_grad or is_wrapper(one) or special_kind(one))
            and shared[storage_key(one)] == 1
            and one.untyped_storage().nbytes() in (0, one.nbytes)  # 0: it lies on the host already
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for plans and errors: on the options, levers that are not used, and bytes elsewhere on the device."""
        terms = self.terms
        found = (*terms.options.notes(terms.device().type), *self.optimizer_choice.notes)
        found += tuple(filter(None, [self.accounts.beside.note]))
        if terms.idle_levers:
            names = " and ".join(map(repr, sorted(terms.idle_levers)))
            found += (f"{names} in allow is not used, since this step is in fp32; give precision='bf16' to use it",)
        return found

    def traced(self, captured: CapturedCall, call: Call, hooked: frozenset[int], levers: Rewriting) -> TracedStep:
        """The joint graphs of a captured call, rewritten by a set of levers. `hooked` has the `id`s of the parameters
        whose gradients hooks wait for: the graphs return these gradients, and do not add them to `.grad` themselves.
        Raises `CaptureError` where the call cannot be traced, and `NothingToRewrite` where the last lever of the set
        finds nothing to rewrite."""
        number = self.terms.lever_sets.index(levers) if levers != self.terms.rewriting else -1
        regions = captured.regions, number
        if regions not in self._traces:
            self._traces[regions] = self._trace(captured, levers)
        key = id(captured), number, hooked
        if key not in self._steps:
            joints = accumulating(self._traces[regions], captured, hooked)
            self._steps[key] = captured, self._step(joints, captured, call, levers)
        return self._steps[key][1]

    def _trace(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[JointGraph, ...]:
        if self._traces:
            gc.collect(1)  # frees the reference cycles of the last trace, among which these graphs would lie scattered
        with stage("tracing"):
            try:
                backend = self.terms.call_backend(whole=captured.whole)
                return trace_call(captured, rewriting, backend, None if captured.whole else self.traces)
            except CaptureError as failure:
                raise CaptureError(cannot_capture(self.terms.model, str(failure))) from failure

    def share_graphs(self, earlier: CallPlanner) -> None:
        """Take over what `earlier`, a planner of the same model with another budget at most, has traced."""
        self._traces, self.traces, self._steps = earlier._traces, earlier.traces, earlier._steps
        self._data_sizes, self.compiled_least = earlier._data_sizes, earlier.compiled_least
        self.differentiate_all = earlier.differentiate_all
        self.forget_solvers()  # schedules found for another budget would make plans depend on the order of requests

    def forget_solvers(self) -> None:
        """Free the solvers of all calls, which take more memory than the graphs; called once a call is planned."""
        for _, (_, step) in self._steps.items():
            step.forget_solvers()

    def forget_sizes(self) -> None:
        """Forget the traced calls: a batch had data-dependent sizes above those that were planned for."""
        self._steps.clear()

    def _step(
        self, joints: tuple[JointGraph, ...], captured: CapturedCall, call: Call, rewriting: Rewriting
    ) -> TracedStep:
        check_rules(self.terms.model, [joint.operators for joint in joints if joint.operators])
        sizes = captured.sizes
        notes = captured.notes + departures(run.region.graph_module for run in captured.runs)
        if captured.whole:
            sizes |= self._sizes(joints[0], call, rewriting)
            notes += (LOSS_OUTSIDE,) * joints[0].ends_before_loss
        if len(joints) > 1:
            notes += (BETWEEN_REGIONS,)
        if self.terms.options.passes:
            notes += (
                f"passes of your own ran, and memopt does not know what they change: {self.terms.options.passes!r}",
            )
        if self.terms.fuses and not all(joint.fused for joint in joints):
            notes += (NOT_FUSED,)
        notes += self.terms.options.cluster.notes() if self.terms.options.cluster else ()
        notes += self.terms.options.notes(self.terms.device().type)
        return TracedStep(
            type(self.terms.model).__name__,
            joints,
            notes,
            sizes,
            rewriting,
            run_sizes=() if captured.whole else sizes_of_runs(joints, captured),
            eager=() if captured.whole else eager_of_runs(joints, captured),
            passed=() if captured.whole else passed_of_runs(joints, captured),
            sharded=self._sharded(captured),
            kept=captured.kept,
        )

    def _sharded(self, captured: CapturedCall) -> Sharding | None:
        """The sharding of a call's parameters over the cluster that is planned for; None for one card."""
        if self.terms.sharding is not None and not captured.whole:
            raise CaptureError(
                f"mesh needs a forward that is one graph; this one breaks, since {captured.break_reason}; give no mesh"
            )
        return self.terms.sharding

    def _sizes(self, region: JointGraph, call: Call, rewriting: Rewriting) -> DataSizes:
        """The data-dependent sizes of a region, observed in a run of the call's forward; empty for fake tensors."""
        depends = any(True for _ in new_symbols(region.module.graph))
        if not depends or not all(map(is_real, (*self.terms.model.parameters(), *tensors_in(call)))):
            return DataSizes()
        seen = match(region.module.graph, self._observed(region.trace.region, call, rewriting.autocast))
        if seen is not None:
            self._data_sizes[region.fingerprint] = DataSizes.of(seen, self._data_sizes.get(region.fingerprint))
        return self._data_sizes.get(region.fingerprint) or DataSizes()

    def _observed(self, region: RecordedRegion, call: Call, low: torch.dtype | None) -> tuple[Observed, ...]:
        """The results of a forward's data-dependent operators. With a dtype `low` the forward runs under autocast to
        it, since the budget of a plan in 16 bits may have no room for fp32; if that raises, in its own dtypes."""
        with suppress(Exception), autocast_to(low, region, keeps_casts=False):
            return observe(self.terms.model, call, self.plain)
        return observe(self.terms.model, call, self.plain)  # index_add, for one, cannot add bf16 to fp32

    def capture_on_fakes(self, call: Call, narrowed: ParameterCast | None) -> CapturedCall:
        """The call captured on fake tensors, with parameters and inputs cast as `narrowed` says (None: not cast).
        Raises `CaptureError` where the model cannot be captured without values."""
        model, sharding, everything = self.terms.model, self.terms.sharding, self.differentiate_all
        if sharding is not None:
            narrowed = ParameterCast(sharding.dtype, frozenset())
        if is_tensor_parallel(model):
            raise CaptureError(
                f"{type(model).__name__} is split by parallelize_module, and can only be captured on "
                "tensors with values; give example inputs with values, on the model's device"
            )
        with stage("capturing"):
            home = self.terms.device()
            return capture_on_fakes(model, call, self.loss_fn, home, differentiate_all=everything, narrowed=narrowed)

    def job(self, call: Call, situation: Situation) -> PlanJob:
        """Everything that the plan of a call depends on, from which the key of the plan on disk is made."""
        chosen = self.optimizer_choice.chosen.names if self.optimizer_choice.chosen else ()
        elsewhere = in_steps(self.accounts.account(call, situation).elsewhere, self.terms.options.budget_bytes)
        live = self.accounts.live_optimizer
        departure = live.departure(self.terms.model.parameters()) if live else ""
        further = self.terms.backend, chosen, sorted(self.optimizer_choice.allowed), elsewhere, departure
        return PlanJob(self.terms.model, call, situation, self.terms.options, self.terms.card, self.loss_fn, further)

    @property
    def screens(self) -> bool:
        """Whether the dtypes of operators depend on the values that a call computes."""
        return bool(self._screenings)

    @cached_property
    def _screenings(self) -> list[Screenings]:
        deciders = (decide for decide in self.terms.rewriting.deciders if isinstance(decide, DecidePrecision))
        return [
            decide.screenings for decide in deciders if decide.screenings is not None and not decide.left_to_autocast
        ]

    def screen(self, call: Call, situation: Situation) -> None:
        """Run a call to record the ranges of values by which the dtypes of operators are decided, once for calls of the
        same kind; does nothing where dtypes do not depend on values."""
        terms, everything = self.terms, self.differentiate_all
        for screenings in self._screenings:
            room = None
            if terms.options.hardware is None:  # the budget is another device's if one was named
                room = terms.options.budget_bytes - self.accounts.account(call, situation).resident_bytes
            screenings.look(
                terms.model, call, self.loss_fn, terms.lever_sets, room_bytes=room, differentiate_all=everything
            )

"""Runs a model's training calls as planned: plans each new situation, and refuses calls that would not fit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from memopt.capture.data_sizes import SizeOutgrown, is_real
from memopt.capture.dynamic_shapes import Place, at_largest, declared_sizes
from memopt.capture.dynamo import GraphBreak, TooManyShapes, in_brief_with_line, loss_call, training_call
from memopt.capture.inputs import Call, call_signature, check_device, on_meta, tensors_in, with_zeros
from memopt.capture.on_fakes import PASSED_OVER
from memopt.capture.region import CapturedCall
from memopt.capture.rehearsal import cannot_capture
from memopt.compat.modules import CurrentParts, plain_call
from memopt.compat.resharding import Resharding
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError
from memopt.garbage import rare_collections
from memopt.optimizers import BF16_PARAMETERS
from memopt.planning.call_planner import CallPlanner
from memopt.planning.captured import Captured
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept
from memopt.planning.situation import Situation
from memopt.planning.terms import terms_of
from memopt.progress import stage
from memopt.recent import Recent
from memopt.run.broken_calls import BrokenCalls, TookAnotherWay
from memopt.run.calls_by_size import CallsBySize
from memopt.run.ceilings import Ceilings
from memopt.run.data_parallel import DataParallel
from memopt.run.keeping import Keeping
from memopt.run.pending import PendingForward
from memopt.run.plain_calls import PlainCalls
from memopt.run.planning_log import PlanningLog
from memopt.run.road import Road
from memopt.run.safety_net import SafetyNet
from memopt.run.sharding import Sharded
from memopt.run.surroundings import Surroundings
from memopt.run.tensor_parallel import check_unbroken
from memopt.run.uncapturable import Uncapturable
from memopt.run.under_way import UnderWay
from memopt.run.unplanned import UnplannedWatch
from memopt.training_state import set_generators


class TrainingCalls:
    """The planned training calls of one model.

    A call is recorded by Dynamo once for all situations (whether gradients are held, the bytes of forwards whose
    backward is still to come, which parameters have hooks), and planned and emitted once for each of them.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        loss_fn: Callable[..., Any] | None,
        own_call: Callable[..., Any] | None,
        watch: UnplannedWatch | None = None,
        parallel: DataParallel | None = None,
        resharding: Resharding | None = None,
    ) -> None:
        self.model, self.options, self.loss_fn, self.own_call = model, options, loss_fn, own_call
        self.watch, self.parallel, self.sharded = watch, parallel or DataParallel(model), Sharded(model)
        self.keeping = Keeping(resharding or Resharding(model), self.sharded)
        self.accumulation = Accumulation()
        self.planner = CallPlanner(model, options, loss_fn, self.plain)
        self.surroundings = Surroundings(
            model, self.planner, self.parallel, options.forwards, one_by_one=options.one_by_one
        )
        self.road = Road(self.planner, self.accumulation)
        self.plain_calls = PlainCalls(model, self.planner, loss_fn, self.surroundings.pending)
        self._ceilings = Ceilings(self._declared)
        self._parts = CurrentParts(model)
        self._latest: Plan | None = None
        self._ran_plain = False  # the latest call
        self._reached: frozenset[int] = frozenset()
        """The parameters with gradients in any call before the present one."""
        self.unplanned = False
        self._uncapturable = Uncapturable(model)
        self._log, self._plans_logged = PlanningLog(), 0
        self._safety_net = SafetyNet(model, self.planner, self.surroundings.pending, self._forget_plans)
        self.accumulation.failed = self._safety_net.backward_failed
        self._breaks: Recent[str, str] = Recent(_MOST_BREAKS)
        """The reason why a call breaks into regions, by its signature."""
        self._recorders_by_dtype: dict[torch.dtype | None, tuple[CallsBySize, BrokenCalls]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.watch is not None:
            self.watch.end()
        self.parallel.look()
        with self._together():
            return self._on_this_rank((args, kwargs))

    def _together(self, *, ahead: bool = False) -> AbstractContextManager[None]:
        """A block around a forward, or around its planning `ahead`, that all ranks end alike."""
        if self.sharded.there:
            return self.sharded.together(self._terms)
        return self.parallel.together(self._terms, ahead=ahead)

    def _on_this_rank(self, call: Call) -> Any:
        """Run a training call: plain where that fits, else by its plan."""
        if self.unplanned:
            return self._unplanned(call)
        self._forget_plans_without_state()
        self.planner.proposing.check_parameters()
        waiting = self.surroundings.begin(call)
        self.accumulation.allowed = self.options.one_by_one or not waiting
        self.accumulation.exchange = self.parallel.exchange
        parts = self._parts.now()
        situation = self.surroundings.situation(parts)
        beside = self.surroundings.beside(call, situation)
        one_graph = not len(self._breaks)
        if fits := self.plain_calls.step_if_it_fits(call, situation, beside, parts, plans_serve_all=one_graph):
            self._ran_plain = True
            self._ceilings.see(call)
            self.planner.reached |= parts.parameter_ids  # which is not looked at
            return self.plain_calls.run(call, fits)
        check_device(call, self.model)
        try:
            with self.planner.types():
                return self._run(UnderWay(call, situation, beside, partial(self._begin, call, time.perf_counter())))
        except BudgetError as refused:
            raise self.surroundings.explain(refused, waiting) from None
        except CaptureError as error:
            if "plain" not in self.options.allow:
                raise
            self._run_unplanned_from_now(str(error))
            return self._unplanned(call)

    def _unplanned(self, call: Call) -> Any:
        self.sharded.begin()
        return self.plain(*call[0], **call[1])

    def _run(self, under_way: UnderWay) -> Any:
        self.planner.screen(under_way.call, under_way.crowded)
        # Under DDP the other ranks go on, so that no rank runs a call a second time.
        inputs, repeat = tensors_in(under_way.call), self.parallel.wrapper is None
        return self._safety_net.run(partial(self._run_any_size, under_way), inputs, repeat=repeat)

    def _run_any_size(self, under_way: UnderWay) -> Any:
        """Run a call; with new plans where it has sizes that those at hand do not serve."""
        try:
            return self._run_once(under_way)
        except SizeOutgrown:
            # A forward writes to buffers only at its end, so that the generators are all there is to undo.
            before = self._safety_net.before
            assert before is not None
            set_generators(before.generators, before.device)
            self._forget_plans()
            return self._run_once(under_way)

    def _run_once(self, under_way: UnderWay) -> Any:
        """Run a call; one that could not be captured before is refused without trying again."""
        self._uncapturable.check(under_way.call)
        try:
            return self._run_regions(under_way)
        except (TookAnotherWay, TooManyShapes):
            raise
        except CaptureError as error:
            self._uncapturable.note(under_way.call, error)
            self._breaks.clear()  # once the model has changed, it may be one region
            raise

    def _terms(self) -> Mapping[str, str]:
        return terms_of(self.model, self.options, self.loss_fn)

    def _run_unplanned_from_now(self, reason: str) -> None:
        self.unplanned = True
        warnings.warn(
            f"{type(self.model).__name__} trains unplanned from now on, as 'plain' in allow has it: {reason}",
            stacklevel=2,
        )

    def _run_regions(self, under_way: UnderWay) -> Any:
        """Run a call as one region; region by region where it has graph breaks."""
        call = under_way.call
        reason = self._breaks.get(call_signature(call)) if len(self._breaks) else None
        if reason is None:
            try:
                return self._whole.run(under_way)
            except GraphBreak as broken:
                check_unbroken(self.model, str(broken))
                reason = self._breaks[call_signature(call)] = str(broken)
        result = self._broken.run(under_way, partial(self._capture_broken, call, reason))
        if self._broken.ran_unplanned:
            self._run_unplanned_from_now("its forward takes another way than when it was planned")
        return result

    def take_captures(self, earlier: TrainingCalls) -> None:
        """Plan from the graphs that `earlier` has, whose options differ in the budget alone; it captures again if it is
        called again."""
        self.planner.share_graphs(earlier.planner)
        self._breaks, self._ceilings = earlier._breaks, earlier._ceilings
        self._ceilings.declared = self._declared
        self._recorders_by_dtype, earlier._recorders_by_dtype = earlier._recorders_by_dtype, {}
        for whole, broken in self._recorders_by_dtype.values():
            whole.travel_by(self.road)
            broken.travel_by(self.road)

    def plan_ahead(self, call: Call, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a call ahead of its first run; `gradients_held`: as one that adds to existing gradients; `advise`: a
        refusal names changes that would help. Ahead of training, all ranks plan together.

        Raises `BudgetError`, `CaptureError`, `RankError`.
        """
        with self._together(ahead=True) if self.options.kept else nullcontext():
            return self._plan_ahead(call, gradients_held=gradients_held, advise=advise)

    def _plan_ahead(self, call: Call, *, gradients_held: bool, advise: bool) -> Plan:
        if not self.options.kept or self._needs_fakes(call):
            call = at_largest(call, self._declared(call))
        self.plain_calls.allowed = False  # who plans ahead wants the plan
        started = time.perf_counter()
        buckets = self.parallel.buckets(gradients_held=gradients_held)
        situation = replace(self.surroundings.situation(), gradients_held=gradients_held, buckets=buckets)
        if group := self.surroundings.beside(call, situation).in_group:
            situation = replace(situation, other_forwards=group.other_forwards, to_come=group.to_come)
        self.planner.proposing.check_allowed()
        with self.planner.types(), torch.enable_grad(), rare_collections():
            self.planner.screen(call, situation)
            if kept := self.road.kept.find_uncaptured(call, situation):
                live = kept.live(self._captured_later(kept, call, situation))
                self._latest = self.road.asked(live, situation, whole=True)
                self._log.planned(self._latest, call, time.perf_counter() - started)
                return self._latest
            captured = self._capture(call)
            self._latest = self.road.plan(captured, call, situation, advise=advise)
            self._log.planned(self._latest, call, time.perf_counter() - started)
        if captured.whole:
            self._whole.planned(captured, call, situation, self._latest)
        else:
            self._broken.planned(captured, call, situation, self._latest)
        return self._latest

    def _capture(self, call: Call) -> CapturedCall:
        """Record a call without running it, so that the first run of such a call finds it recorded.

        Raises `CaptureError`.
        """
        if self._needs_fakes(call):
            return self.planner.capture_on_fakes(call, self.planner.proposing.narrowed)
        given = all(map(is_real, tensors_in(call)))
        with stage("capturing"):
            try:
                captured = self._whole.capture(call if given else with_zeros(call, self.planner.device()))
                if captured is not None:
                    return captured
                reason = PASSED_OVER
            except GraphBreak as broken:
                check_unbroken(self.model, str(broken))
                reason = str(broken)
        try:
            return self._capture_broken(call, reason)
        except ValueError:  # ours, CaptureError among them
            raise
        except Exception as failure:  # the model's own: ahead of any step it says that it cannot be planned
            error = f"{reason}; running past it failed: {in_brief_with_line(failure)}"
            raise CaptureError(cannot_capture(self.model, error)) from failure

    def _needs_fakes(self, call: Call) -> bool:
        """Whether a call is recorded on fake tensors: the model has no values, or will have another dtype, or the call
        has none and will not run."""
        if self.planner.proposing.narrowed is not None or not all(map(is_real, self.model.parameters())):
            return True
        runs_later = self.options.kept and not self.planner.screens
        return not runs_later and not all(map(is_real, tensors_in(call)))

    def _capture_broken(self, call: Call, reason: str) -> CapturedCall:
        """Record the regions of a call: on its values where the model and the call have any, without those where no
        code between the regions needs them and plans are not kept."""
        real = all(map(is_real, (*self.model.parameters(), *tensors_in(call))))
        if not real or not self.options.kept:
            try:
                return self.planner.capture_on_fakes(call, self.planner.proposing.narrowed)
            except CaptureError:
                if not real or self.planner.proposing.narrowed is not None:
                    raise
        with stage("capturing"):
            return self._broken.capture(call, reason)

    def _captured_later(self, kept: Kept, call: Call, situation: Situation) -> Callable[[], Captured]:
        """A function that captures and traces, at its first call, the graphs that a plan from disk is for."""
        hollow = on_meta(call)

        @cache
        def captured() -> Captured:
            planner = self.planner
            narrowed = planner.proposing.narrowing() if BF16_PARAMETERS in kept.plan.proposals else None
            with planner.types(), torch.enable_grad():
                recorded = planner.capture_on_fakes(hollow, narrowed)
                step = planner.rewrite_and_price(recorded, hollow, situation, planner.lever_sets[kept.lever_set])
            return planner.proposing.as_kept(step, kept.plan)

        return captured

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest call; where that ran plain, the plan that it would run by otherwise, made now."""
        if not self._ran_plain:
            return self._latest
        with self.planner.types(), torch.enable_grad():
            return self.plain_calls.shown(self.road, self.surroundings.situation())

    @property
    def in_use(self) -> Plan | None:
        """The plan of the latest call; None where that ran plain."""
        return None if self._ran_plain else self._latest

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model's forward, and its loss function if there is one."""
        run: Any = self.own_call or plain_call(self.model)
        return loss_call(run, self.loss_fn, self.planner.proposing.floats)(*args, **kwargs)

    @property
    def _whole(self) -> CallsBySize:
        return self._recorders[0]

    @property
    def _broken(self) -> BrokenCalls:
        return self._recorders[1]

    @property
    def _recorders(self) -> tuple[CallsBySize, BrokenCalls]:
        """The recorders of calls with one region and with several, for the dtype in which the model takes inputs; they
        are made again when that dtype changes, which it does once at most."""
        floats = self.planner.proposing.floats
        if floats not in self._recorders_by_dtype:
            to_capture = partial(training_call, self.model, self.loss_fn, floats)
            all_outputs = self.planner.differentiate_all
            whole = CallsBySize(to_capture, self.road, self._ceilings, differentiate_all=all_outputs)
            unplanned_allowed = "plain" in self.options.allow
            broken = BrokenCalls(self.model, to_capture, self.road, self.keeping, unplanned_allowed=unplanned_allowed)
            self._recorders_by_dtype = {floats: (whole, broken)}
        return self._recorders_by_dtype[floats]

    def _declared(self, call: Call) -> dict[Place, int | None]:
        """The places of a call whose sizes the user declares to change, and the largest size of each."""
        return declared_sizes(self.options.dynamic, call, self.model, with_targets=self.loss_fn is not None)

    def _forget_plans(self) -> None:
        self._whole.forget()
        self._broken.forget()
        self.planner.forget_sizes()

    def _forget_plans_without_state(self) -> None:
        """Have calls planned again once a call has trained parameters that those before it did not reach: there is
        state of the optimiser for them from then on."""
        reached = self.planner.reached
        if self._reached and reached != self._reached:
            self._whole.forget()
            self._broken.forget_plans(but=self._latest)
        self._reached = reached

    def _begin(
        self, call: Call, started: float, plan: Plan, situation: Situation, exchanges: int = 0
    ) -> PendingForward:
        """Register a forward of a call that `started` then and runs by a plan, which thereby becomes the latest one;
        `exchanges` tells its collectives, which all ranks have to run alike."""
        if self.road.plans != self._plans_logged:
            self._plans_logged = self.road.plans
            self._log.planned(plan, call, time.perf_counter() - started)
        self._latest, self._ran_plain = plan, False
        self.sharded.begin(exchanges)
        forward = self.surroundings.planned(call, situation, plan, self.accumulation)
        forward.before = self._safety_net.before
        return forward


_MOST_BREAKS = 256
"""The number of signatures that are remembered to break into regions."""

"""Runs a model's training calls as planned: plans each new situation, and refuses calls that would not fit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from memopt.capture.data_sizes import SizeOutgrown
from memopt.capture.dynamic_shapes import at_largest
from memopt.capture.dynamo import loss_call
from memopt.capture.inputs import Call, check_device, check_kinds, on_meta, tensors_in
from memopt.compat.modules import CurrentParts, Parts, plain_call
from memopt.compat.resharding import Resharding
from memopt.emit.gradients import Accumulation
from memopt.errors import BudgetError, CaptureError
from memopt.garbage import rare_collections
from memopt.planning.call_planner import CallPlanner
from memopt.planning.job_key import terms_of
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from memopt.planning.plan_cache import Kept
from memopt.planning.priced_step import PricedStep
from memopt.planning.stages import Recorded
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.data_parallel import DataParallel
from memopt.run.keeping import Keeping
from memopt.run.pending import PendingForward
from memopt.run.plain_calls import PlainCalls
from memopt.run.planning_log import PlanningLog, shapes_of
from memopt.run.recorder import Recorder
from memopt.run.road import Road
from memopt.run.safety_net import SafetyNet
from memopt.run.sharding import Sharded
from memopt.run.share import Share
from memopt.run.status import State, Status, planned_in_words
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
        keeping = Keeping(resharding or Resharding(model), self.sharded)
        self.accumulation = Accumulation()
        self.share = Share(model, options, self.parallel)
        self.planner = CallPlanner(model, options, loss_fn, self.plain, self.share)
        self.road = Road(self.planner, self.accumulation, self._recording)
        self.plain_calls = PlainCalls(model, self.planner, loss_fn, self.share.entry)
        self.recorded = Recorder(model, options, loss_fn, self.road, keeping)
        self._parts = CurrentParts(model)
        self.status = Status(type(model).__name__)
        """The state after the latest call, which `_enter` alone changes."""
        self._reached: frozenset[int] = frozenset()
        """The parameters with gradients in any call before the present one."""
        self._stepped_elsewhere: frozenset[int] | None = None
        """Parameters that the optimiser had stepped before the present call, and no call reached; None before the first
        one."""
        self._log, self._plans_logged = PlanningLog(), 0
        self._safety_net = SafetyNet(model, self.planner.accounts, self.share.entry, self._forget_plans)
        self.accumulation.failed = self._safety_net.backward_failed

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
        if self.status.state is State.UNPLANNED:
            return self._unplanned(call)
        parts = self._parts.now()
        self._forget_plans_without_state(parts)
        self.planner.proposing.check_parameters()
        waiting = self.share.begin(call)
        self.accumulation.allowed = self.options.one_by_one or not waiting
        self.accumulation.exchange = self.parallel.exchange
        situation = self.share.situation(self.planner.proposing, parts)
        moment = self.share.moment(call, situation)
        one_graph = not self.recorded.breaks
        if fits := self.plain_calls.step_if_it_fits(call, situation, moment, parts, plans_serve_all=one_graph):
            self._enter(State.PLAIN, fits.reason)
            self.recorded.size_bounds.see(call)
            self.planner.accounts.note_reached(fits.step.reached)
            return self.plain_calls.run(call, fits)
        check_device(call, self.model)
        try:
            with self._refusing(), self.planner.terms.types():
                check_kinds(call, parts)
                try:
                    return self._run(
                        CallInProgress(call, situation, moment, partial(self._begin, call, time.perf_counter()))
                    )
                except BudgetError as refused:
                    raise self.share.explain(refused, waiting) from None
        except CaptureError as error:
            if "plain" not in self.options.allow:
                raise
            self._run_unplanned_from_now(str(error))
            return self._unplanned(call)

    def _unplanned(self, call: Call) -> Any:
        self.sharded.begin()
        return self.plain(*call[0], **call[1])

    def _run(self, in_progress: CallInProgress) -> Any:
        self.planner.screen(in_progress.call, in_progress.crowded)
        # Under DDP the other ranks go on, so that no rank runs a call a second time.
        inputs, repeat = tensors_in(in_progress.call), self.parallel.wrapper is None
        return self._safety_net.run(partial(self._attempt, in_progress), inputs, repeat=repeat)

    def _attempt(self, in_progress: CallInProgress) -> Any:
        """Run a call; with new plans where it has sizes that those at hand do not serve."""
        try:
            result = self.recorded.run(in_progress)
        except SizeOutgrown:
            # A forward writes to buffers only at its end, so that the generators are all there is to undo.
            before = self._safety_net.before
            assert before is not None
            set_generators(before.generators, before.device)
            self._forget_plans()
            result = self.recorded.run(in_progress)
        if self.recorded.broken.ran_unplanned:
            self._run_unplanned_from_now("its forward takes another way than when it was planned")
        return result

    def _terms(self) -> Mapping[str, str]:
        return terms_of(self.model, self.options, self.loss_fn)

    def _enter(self, state: State, reason: str, plan: Plan | None = None) -> None:
        """Enter a state, with the plan of a call that has one; the latest plan stays known in all others."""
        self.status = Status(self.status.model, state, reason, plan or self.status.plan)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A block whose refusal is a state; after any other error the state is the one from before."""
        before = self.status
        try:
            yield
        except (BudgetError, CaptureError) as refused:
            self._enter(State.REFUSED, str(refused))
            raise
        except BaseException:
            self.status = before
            raise

    def _recording(self) -> None:
        """Enter the state of a call that is recorded or planned now."""
        self._enter(State.RECORDING, "a call is recorded and planned")

    def _planned(self, plan: Plan, call: Call, seconds: float) -> None:
        """Enter the state of a call that has a plan, which was made in so many seconds, and log it."""
        self._enter(State.PLANNED, planned_in_words(plan, shapes_of(call)), plan)
        self._log.planned(plan, call, seconds)

    def _run_unplanned_from_now(self, reason: str) -> None:
        self._enter(State.UNPLANNED, reason)
        warnings.warn(
            f"{type(self.model).__name__} trains unplanned from now on, as 'plain' in allow has it: {reason}",
            stacklevel=2,
        )

    def take_captures(self, earlier: TrainingCalls) -> None:
        """Plan from the graphs that `earlier` has, whose options differ in the budget alone; it captures again if it is
        called again."""
        self.planner.share_graphs(earlier.planner)
        self.recorded.take(earlier.recorded)

    def plan_ahead(self, call: Call, *, gradients_held: bool = False, advise: bool = True) -> Plan:
        """Plan a call ahead of its first run; `gradients_held`: as one that adds to existing gradients; `advise`: a
        refusal names changes that would help. Ahead of training, all ranks plan together.

        Raises `BudgetError`, `CaptureError`, `RankError`.
        """
        with self._together(ahead=True) if self.options.kept else nullcontext():
            return self._plan_ahead(call, gradients_held=gradients_held, advise=advise)

    def _plan_ahead(self, call: Call, *, gradients_held: bool, advise: bool) -> Plan:
        check_kinds(call, self._parts.now())
        if not self.options.kept or self.recorded.needs_fakes(call):
            call = at_largest(call, self.recorded.declared(call))
        self.plain_calls.allowed = False  # who plans ahead wants the plan
        started = time.perf_counter()
        buckets = self.parallel.buckets(gradients_held=gradients_held)
        situation = replace(
            self.share.situation(self.planner.proposing), gradients_held=gradients_held, buckets=buckets
        )
        if group := self.share.moment(call, situation).in_group:
            situation = replace(situation, other_forwards=group.other_forwards, to_come=group.to_come)
        self.planner.proposing.check_allowed()
        with self._refusing(), self.planner.terms.types(), torch.enable_grad(), rare_collections():
            self.planner.screen(call, situation)
            if kept := self.road.kept.find_uncaptured(call, situation):
                live = kept.live(self._priced_later(kept, call, situation))
                plan = self.road.asked(live, situation, whole=True)
                self._planned(plan, call, time.perf_counter() - started)
                return plan
            captured = self.recorded.capture(call)
            plan = self.road.plan(captured, call, situation, advise=advise)
            self._planned(plan, call, time.perf_counter() - started)
        self.recorded.planned(captured, call, situation, plan)
        return plan

    def _priced_later(self, kept: Kept, call: Call, situation: Situation) -> Callable[[], PricedStep]:
        """A function that captures, traces and prices, at its first call, the graphs that a plan from disk is for."""
        hollow = on_meta(call)

        @cache
        def step() -> PricedStep:
            planner = self.planner
            narrowed = planner.proposing.narrowed_by(kept.plan)
            with planner.terms.types(), torch.enable_grad():
                recorded = Recorded(planner, planner.capture_on_fakes(hollow, narrowed), hollow, situation)
                traced = recorded.trace(planner.terms.lever_sets[kept.lever_set])
                return traced.price_as_kept(kept.plan, kept.plan.account).step

        return step

    @property
    def latest(self) -> Plan | None:
        """The plan of the latest call; where that ran plain, the plan that it would run by otherwise, made now."""
        if self.status.state is not State.PLAIN:
            return self.status.plan
        before = self.status  # a plan that is only shown is no state
        try:
            with self.planner.terms.types(), torch.enable_grad():
                return self.plain_calls.shown(self.road, self.share.situation(self.planner.proposing))
        finally:
            self.status = before

    @property
    def in_use(self) -> Plan | None:
        """The plan of the latest call; None where that ran plain."""
        return None if self.status.state is State.PLAIN else self.status.plan

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain model's forward, and its loss function if there is one."""
        run: Any = self.own_call or plain_call(self.model)
        return loss_call(run, self.loss_fn, self.planner.proposing.floats)(*args, **kwargs)

    def _forget_plans(self) -> None:
        self.recorded.forget()
        self.planner.forget_sizes()

    def _forget_plans_without_state(self, parts: Parts) -> None:
        """Have calls planned again once a call, or code outside of the forward, has trained parameters that those
        before it did not reach: there is state of the optimiser for them from then on."""
        accounts = self.planner.accounts
        accounts.note_reached({id(one) for one in parts.parameters if one.grad is not None})
        reached, elsewhere = accounts.reached, accounts.stepped_elsewhere & parts.parameter_ids
        known = elsewhere if self._stepped_elsewhere is None else self._stepped_elsewhere
        if (self._reached and reached != self._reached) or not elsewhere <= known:
            self.recorded.forget_plans(but=self.status.plan)
            self.plain_calls.forget()
        self._reached, self._stepped_elsewhere = reached, known | elsewhere

    def _begin(
        self, call: Call, started: float, plan: Plan, situation: Situation, exchanges: int = 0
    ) -> PendingForward:
        """Register a forward of a call that `started` then and runs by a plan, which thereby becomes the latest one;
        `exchanges` tells its collectives, which all ranks have to run alike."""
        if self.road.plans != self._plans_logged:
            self._plans_logged = self.road.plans
            self._planned(plan, call, time.perf_counter() - started)
        elif plan is not self.status.plan or self.status.state is not State.PLANNED:
            self._enter(State.PLANNED, planned_in_words(plan, shapes_of(call)), plan)
        self.sharded.begin(exchanges)
        forward = self.share.planned(call, situation, plan, self.accumulation)
        forward.before = self._safety_net.before
        return forward

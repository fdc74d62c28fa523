"""Training calls in one situation: planned and compiled for each set of shapes, whole or region by region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.capture.author_modes import autocast_state
from memopt.capture.data_sizes import guard_sizes
from memopt.capture.dynamo import (
    GraphBreak,
    TooManyShapes,
    compile_call,
    lower,
    parameter_numbers,
)
from memopt.capture.inputs import Call, call_signature
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NothingToRewrite
from memopt.capture.outputs import detach_all_but_scalars, hand_out
from memopt.compat import tracing_again
from memopt.emit import Lowered
from memopt.emit.partition import partition
from memopt.emit.stepping import check_own_memory
from memopt.errors import BudgetError
from memopt.planning import plan_cache
from memopt.planning.climb import Climb
from memopt.planning.plan import Plan
from memopt.planning.refit import ROUNDS, Refit, as_lowered
from memopt.planning.state import State
from memopt.rewrite import Rung
from memopt.run.pending import PendingForward
from memopt.run.region_calls import RegionCalls

if TYPE_CHECKING:
    from memopt.run.training import TrainingCalls


class _NotYet(Exception):
    """The plan recomputes, or there is none: other levers are to be tried first."""


class _AnotherStep(Exception):
    """The plan is not one for this region."""


class TooTight(Exception):
    """The plan leaves no room for the forwards in waiting: plan for this very situation."""


class Situation:
    """Training calls in one state: each set of shapes is planned when it comes, and compiled for good."""

    def __init__(self, calls: TrainingCalls, state: State) -> None:
        self.calls, self.state = calls, state
        self._call: Call | None = None
        self._others = 0
        self._broken: dict[str, RegionCalls] = {}
        """Calls that break into regions, by their signature and the autocast that they are made under."""
        self._whole = self._compile_whole()

    def run(self, call: Call, others: int) -> Any:
        """Run a planned call; forwards in waiting now hold `others` bytes."""
        self._call, self._others = call, others
        try:
            signature = f"{call_signature(call)} {autocast_state()}"
            broken = self._broken.get(signature) if self._broken else None
            if broken is None:
                try:
                    return self._run_whole(call)
                except GraphBreak:
                    broken = RegionCalls(self.calls, self.state, call)
                    self._broken[signature] = broken
            return broken.run(call, self._begin(broken.plan))
        finally:
            self._call = None

    def _begin(self, plan: Plan) -> PendingForward:
        """Account for a forward that is about to run as planned."""
        if plan.ceiling_bytes - self.state.other_forwards + self._others > plan.budget_bytes:
            raise TooTight
        return self.calls.begin(plan, self.state)

    def _compile_whole(self) -> Callable[..., Any]:
        return compile_call(self.calls.to_capture(), self._plan_and_lower, whole=True)

    def _run_whole(self, call: Call) -> Any:
        try:
            return self._whole(*call[0], **call[1])
        except TooManyShapes:
            self._whole = self._compile_whole()
            return self._whole(*call[0], **call[1])

    def _plan_and_lower(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend for a call that is one region: planned as soon as its joint graph is there."""
        undifferentiated = frozenset() if self.calls.planner.differentiate_all else detach_all_but_scalars(graph_module)
        compiled, plan = self._refit(graph_module, inputs)
        if plan is None:
            return compiled  # without gradients: nothing waits for a backward

        steps = plan.regions[0].steps

        def region(*args: Any) -> Any:
            check_own_memory(args, steps)
            forward = self._begin(plan)
            return hand_out(compiled(*args), undifferentiated, forward)

        return region

    def _refit(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Callable[..., Any], Plan | None]:
        """Plan and lower a region, again while what was lowered is not what was planned, and to be bettered.

        No plan comes back where there are no gradients. Raises `BudgetError`.
        """
        again = tracing_again()
        assert self._call is not None
        planner = self.calls.planner
        job = planner.job(self._call, self.state)
        key = job.key(graph_module) if job else None
        if known := self._as_kept(graph_module, inputs, again, key):
            return known
        refit: Refit[Lowered] = Refit(self.calls.options.budget_bytes)
        for _ in range(ROUNDS):
            try:
                lowered, plan = self._climb(graph_module, inputs, again, refit.lowering_bytes)
            except BudgetError:
                if not refit.fits:
                    raise
                break
            if plan is None:
                return lowered.run, None
            if lowered.footprint is None:
                planner.keep(key, plan)
                return lowered.run, plan
            if not refit.judge(as_lowered(plan, lowered.footprint), lowered):
                break
        plan, lowered = refit.best()
        planner.keep(key, plan, lowered.footprint)
        return lowered.run, plan

    def _as_kept(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        again: Callable[[], AbstractContextManager[Any]],
        key: str | None,
    ) -> tuple[Callable[..., Any], Plan] | None:
        """Lower a region by the plan that was kept for it, if there is one and it still is this region's."""
        kept, rungs = plan_cache.find(key), self.calls.planner.rungs
        if kept is None or kept.rung >= len(rungs):
            return None
        if self.calls.planner.lowering.fuses and kept.footprint is None:
            return None  # planned ahead, and not lowered yet
        try:
            with again():
                lowered, plan = self._lower_whole(graph_module, inputs, rungs[kept.rung], kept.plan, 0)
        except (_AnotherStep, NothingToRewrite):
            plan = None
        if plan is None or lowered.footprint != kept.footprint:
            plan_cache.drop(key)
            return None
        return lowered.run, plan

    def _climb(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        again: Callable[[], AbstractContextManager[Any]],
        lowering_bytes: int,
    ) -> tuple[Lowered, Plan | None]:
        """Lower a region by the best plan of all rungs, when lowering adds so many bytes."""
        climb = self.calls.planner.climb(self.state)
        for rung in self.calls.planner.rungs:
            try:
                with again():
                    return self._lower_whole(graph_module, inputs, rung, climb, lowering_bytes)
            except NothingToRewrite as nothing:
                climb.skip(rung, nothing.notes)
            except _NotYet:
                pass
        plan, rung = climb.best()
        with again():
            return self._lower_whole(graph_module, inputs, rung, plan, lowering_bytes)

    def _lower_whole(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        rung: Rung,
        decide: Climb | Plan,
        lowering_bytes: int,
    ) -> tuple[Lowered, Plan | None]:
        """Lower a region by a plan, or by the one that is made now, if it is worth it (else raises `_NotYet`).

        No plan comes back where there are no gradients. Raises `NothingToRewrite`.
        """
        plans: list[Plan] = []
        assert self._call is not None
        call, planner = self._call, self.calls.planner

        def cut(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            captured = planner.remember((joint,), call, rung.rewriting)
            if isinstance(decide, Climb):
                account = replace(planner.account(call, self.state), lowering=lowering_bytes)
                plan = decide.weigh(rung, captured, account)
                if plan is None:
                    raise _NotYet
            elif decide.regions[0].fingerprint == joint.fingerprint:
                planned_for = planner.proposing.as_kept(captured, decide)
                plan = replace(decide, origin=lambda: planned_for)
            else:
                raise _AnotherStep
            plans.append(plan)
            # Code that is compiled takes a copy of a gradient that it cannot add to one that is there.
            accumulation = self.calls.accumulation if self.state.gradients_held or not joint.fused else None
            forward, backward = partition(joint, plan.regions[0], accumulation)
            guard_sizes(forward, captured.data_sizes.allowed)
            return forward, backward

        parameters = parameter_numbers(inputs, self.state.hooked)
        lowered = lower(graph_module, inputs, parameters, cut, rung.rewriting, planner.lowering)
        return lowered, (plans[0] if plans else None)

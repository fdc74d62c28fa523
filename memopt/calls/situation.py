"""Training calls in one situation: planned and compiled for each set of shapes, whole or region by region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.calls.pending import PendingForward
from memopt.capture.author_modes import autocast_state
from memopt.capture.data_sizes import guard_sizes
from memopt.capture.dynamo import (
    GraphBreak,
    TooManyShapes,
    compile_call,
    example_inputs,
    lower,
    parameter_numbers,
)
from memopt.capture.inputs import Call, call_signature
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NothingToRewrite
from memopt.capture.outputs import detach_all_but_scalars, hand_out
from memopt.emit.partition import RegionSchedule, partition
from memopt.errors import BudgetError, CaptureError
from memopt.levers import Rung
from memopt.lowering import Lowered
from memopt.planning.climb import Climb
from memopt.planning.plan import Plan
from memopt.planning.refit import ROUNDS, Refit, as_lowered
from memopt.planning.state import State
from memopt.torch_compat import tracing_again

if TYPE_CHECKING:
    from memopt.calls.training import TrainingCalls


class _NotYet(Exception):
    """The plan recomputes, or there is none: other levers are to be tried first."""


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

        def region(*args: Any) -> Any:
            forward = self._begin(plan)
            return hand_out(compiled(*args), undifferentiated, forward)

        return region

    def _refit(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Callable[..., Any], Plan | None]:
        """Plan and lower a region, again while what was lowered is not what was planned, and to be bettered.

        No plan comes back where there are no gradients. Raises `BudgetError`.
        """
        refit: Refit[Callable[..., Any]] = Refit(self.calls.options.budget_bytes)
        again = tracing_again()
        for _ in range(ROUNDS):
            try:
                lowered, plan = self._climb(graph_module, inputs, again, refit.lowering_bytes)
            except BudgetError:
                if not refit.fits:
                    raise
                break
            if plan is None or lowered.footprint is None:
                return lowered.run, plan
            if not refit.judge(as_lowered(plan, lowered.footprint), lowered.run):
                break
        plan, compiled = refit.best()
        return compiled, plan

    def _climb(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        again: Callable[[], AbstractContextManager[Any]],
        lowering_bytes: int,
    ) -> tuple[Lowered, Plan | None]:
        """Lower a region by the best plan of all rungs, when lowering adds so many bytes."""
        climb = self.calls.planner.climb()
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
            else:
                plan = decide
            plans.append(plan)
            # Code that is compiled takes a copy of a gradient that it cannot add to one that is there.
            accumulation = self.calls.accumulation if self.state.gradients_held or not joint.fused else None
            forward, backward = partition(joint, plan.regions[0], accumulation)
            guard_sizes(forward, captured.data_sizes.allowed)
            return forward, backward

        parameters = parameter_numbers(inputs, self.state.hooked)
        lowered = lower(graph_module, inputs, parameters, cut, rung.rewriting, planner.lowering)
        return lowered, (plans[0] if plans else None)


class RegionCalls:
    """Calls of one signature whose forward breaks into regions, planned all together before the first runs.

    The runs of a forward are counted, and each has a schedule of its own, also where Dynamo compiles one region for
    all of them (a block called in a loop).
    """

    def __init__(self, calls: TrainingCalls, state: State, call: Call) -> None:
        self.calls = calls
        self.plan = calls.planner.plan_ahead(call, state)
        self.forward: PendingForward | None = None
        assert self.plan.captured is not None
        self.regions = self.plan.captured.regions
        self._run = compile_call(calls.to_capture(), self._lower, whole=False)

    def run(self, call: Call, forward: PendingForward) -> Any:
        self.forward = forward
        try:
            return self._run(*call[0], **call[1])
        finally:
            self.forward = None

    def next_run(self, fingerprint: str) -> int:
        """The number of the run that begins now. Raises `CaptureError` where it was not planned."""
        assert self.forward is not None
        number = self.forward.regions_run
        if number >= len(self.regions) or self.regions[number].fingerprint != fingerprint:
            raise CaptureError(
                "the forward took another way than when it was planned: it depends on the values of its inputs outside "
                "of any captured region; mend the graph break, or add 'plain' to allow to run it unplanned"
            )
        return number

    def _lower(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend for a region."""
        try:
            region = _Region(self, graph_module, inputs)
        except CaptureError:
            return self.eager(graph_module)
        return region.unplanned or region

    def eager(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """The region unplanned, where the user allows that; inside of an `except CaptureError`."""
        if "plain" not in self.calls.options.allow:
            raise
        self.calls.unplanned = True
        return graph_module.forward


class _Region:
    """A compiled region: lowered once for each schedule that its runs have."""

    def __init__(self, owner: RegionCalls, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.owner, self.graph_module = owner, graph_module
        self.again: Callable[[], AbstractContextManager[Any]] = tracing_again()
        self.variants: dict[tuple[RegionSchedule, frozenset[int]], Callable[..., Any]] = {}
        self.fingerprint = ""
        self.unplanned: Callable[..., Any] | None = None
        compiled = self.lower(inputs)
        if not self.variants:
            self.unplanned = compiled

    def __call__(self, *args: Any) -> Any:
        try:
            number = self.owner.next_run(self.fingerprint)
        except CaptureError:
            return self.owner.eager(self.graph_module)(*args)
        if self.key(number) not in self.variants:
            with self.again():
                self.lower(example_inputs(self.graph_module))  # not those of the first run: they would live on here
        forward = self.owner.forward
        assert forward is not None
        forward.regions_run += 1
        return hand_out(self.variants[self.key(number)](*args), frozenset(), forward)

    def key(self, number: int) -> tuple[RegionSchedule, frozenset[int]]:
        return self.owner.plan.regions[number], self.owner.regions[number].parameter_inputs

    def lower(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower for the run that begins now."""
        keys: list[tuple[RegionSchedule, frozenset[int]]] = []

        def cut(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            self.fingerprint = joint.fingerprint
            keys.append(self.key(self.owner.next_run(joint.fingerprint)))
            schedule, parameters = keys[0]
            return partition(replace(joint, parameter_inputs=parameters), schedule, self.owner.calls.accumulation)

        assert self.owner.plan.captured is not None
        rewriting = replace(self.owner.plan.captured.rewriting, needed="")  # it has work in some region
        compiled = lower(self.graph_module, inputs, frozenset(), cut, rewriting).run
        self.variants.update(dict.fromkeys(keys, compiled))
        return compiled

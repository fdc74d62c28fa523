"""Training calls whose forward breaks into regions: planned all together, before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from memopt.capture.author_modes import autocast_state
from memopt.capture.dynamo import compile_call
from memopt.capture.inputs import Call, call_signature
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.outputs import hand_out
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun, together
from memopt.capture.rehearsal import Rehearsal, rehearse, undone
from memopt.capture.trace import trace
from memopt.emit.emit import emit_region
from memopt.emit.emitted import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning.plan import Plan
from memopt.planning.region_schedule import RegionSchedule
from memopt.planning.situation import Situation
from memopt.recent import Recent
from memopt.run.pending import PendingForward
from memopt.run.region_stub import recording
from memopt.run.road import Road
from memopt.run.under_way import UnderWay
from memopt.training_state import ForwardState

_MOST_PLANS = 64
"""The number of plans that are kept, one for each signature and situation of a call."""
_MOST_VARIANTS = 1024
"""The number of emitted regions that are kept, one for each region and schedule."""


class TookAnotherWay(CaptureError):
    """A forward ran through other regions than those that were planned, twice from the same state."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """A plan, and the captured call that it is for."""

    captured: CapturedCall
    plan: Plan
    runs: tuple[RegionRun, ...]
    """The runs that have a schedule, in the order of the plan's regions."""


class BrokenCalls:
    """Plans and runs calls with graph breaks.

    The runs of regions in a forward are counted, and each has a schedule of its own, also where Dynamo compiles one
    region for several of them (a block that is called in a loop). A forward may leave out runs that are planned. One
    that has others is undone, captured, and planned together with those before it, so that after a few steps one plan
    serves every way through the model's code.
    """

    def __init__(
        self, model: nn.Module, to_capture: Callable[[], Callable[..., Any]], road: Road, *, unplanned_allowed: bool
    ) -> None:
        self.model, self.road, self.unplanned_allowed = model, road, unplanned_allowed
        self.ran_unplanned = False
        self._rehearsal: Rehearsal | None = None
        self._forward: _Forward | None = None
        self._captured: Recent[str, CapturedCall] = Recent(_MOST_PLANS)
        """All runs of regions that calls of a signature were seen to have."""
        self._plans: Recent[tuple[str, Situation], _Planned] = Recent(_MOST_PLANS)
        self._traced: Recent[tuple[RecordedRegion, Rewriting], JointGraph] = Recent(_MOST_VARIANTS)
        """Joint graphs of regions that were recorded once more than those that were planned."""
        self._emitted: Recent[tuple[RecordedRegion, RegionSchedule, frozenset[int]], Emitted] = Recent(_MOST_VARIANTS)
        self._compiled = compile_call(to_capture(), recording(self, differentiate_all=True), whole=False)

    def capture(self, call: Call, reason: str) -> CapturedCall:
        """Record the regions of a call by running it once without gradients; changes to the model are then undone.

        `reason` says why the call is not one region. Raises `CaptureError`.
        """
        self._rehearsal = Rehearsal()
        try:
            with undone(self.model):
                return rehearse(lambda: self._compiled(*call[0], **call[1]), self._rehearsal, self.model, reason)
        finally:
            self._rehearsal = None

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have further calls with the signature and the situation of this one run by a plan."""
        self._captured[_signature(call)] = captured
        self._plans[_signature(call), situation] = self._with_runs(captured, plan)

    def forget(self) -> None:
        """Drop all plans and emitted regions, so that every call is planned again."""
        self._plans.clear()
        self._emitted.clear()

    def run(self, under_way: UnderWay, capture: Callable[[], CapturedCall]) -> Any:
        """Run a call by its plan. Where there is none, `capture` records the regions, and the plan is made first.

        Raises `BudgetError`, `CaptureError`.
        """
        call = under_way.call
        before = ForwardState.of(self.model)
        try:
            return self._run(under_way, capture, last=False)
        except TookAnotherWay:
            if not before.can_be_undone():
                raise
            before.undo()
            self._captured[_signature(call)] = together(self._captured[_signature(call)], capture())
        return self._run(under_way, capture, last=True)

    def _run(self, under_way: UnderWay, capture: Callable[[], CapturedCall], *, last: bool) -> Any:
        """Run a call; `last`: there is no further attempt after it."""
        planned = under_way.fitting(
            lambda situation: self._plan_for(under_way.call, situation, capture), lambda planned: planned.plan
        )
        pending = under_way.begin(planned.plan)
        self._forward = _Forward(planned, pending, may_run_unplanned=last and self.unplanned_allowed)
        try:
            return self._compiled(*under_way.call[0], **under_way.call[1])
        except TookAnotherWay:
            pending.after_backward()  # it will have none
            raise
        finally:
            self._forward = None

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run one region of the present call: by the plan of this run, or, while the call is captured, unplanned."""
        if self._rehearsal is not None:
            return self._rehearsal.run(region, inputs)
        if not region.differentiable:
            return region.graph_module(*inputs)
        forward = self._forward
        assert forward is not None, "a region runs outside of any call"
        emitted = self._next(RegionRun.of(region, inputs), forward)
        if emitted is None and not self._trace(region, forward.rewriting).differentiated:
            return region.graph_module(*inputs)  # views of its inputs: no plan has a place for them
        if emitted is None and forward.may_run_unplanned:
            self.ran_unplanned = True
            return region.graph_module(*inputs)
        if emitted is None:
            raise TookAnotherWay(
                "the forward took another way than when it was planned, from the same inputs and random numbers, "
                f"{'; '.join(forward.notes[:1])}; mend the graph break, or add 'plain' to allow to run it unplanned"
            )
        return hand_out(forward.pending.hands_out(emitted.run(*inputs)), frozenset(), forward.pending)

    def _next(self, run: RegionRun, forward: _Forward) -> Emitted | None:
        """The emitted region for the run that begins now; None where that run is not planned."""
        found = forward.next_run(run, self._trace)
        if found is None:
            return None
        joint, schedule = found
        key = run.region, schedule, joint.parameter_inputs
        if key not in self._emitted:
            self._emitted[key] = emit_region(joint, schedule, self.road.accumulation, {})
        return self._emitted[key]

    def _trace(self, region: RecordedRegion, rewriting: Rewriting) -> JointGraph:
        key = region, rewriting
        if key not in self._traced:
            self._traced[key] = trace(region, rewriting)
        return self._traced[key]

    def _plan_for(self, call: Call, situation: Situation, capture: Callable[[], CapturedCall]) -> _Planned:
        signature = _signature(call)
        if signature not in self._captured:
            self._captured[signature] = capture()
        captured = self._captured[signature]
        planned = self._plans.get((signature, situation))
        if planned is not None and planned.captured is captured:
            return planned
        try:
            plan = self.road.plan(captured, call, situation, advise=False)
        except BudgetError:
            alone = capture()
            if len(alone.runs) >= len(captured.runs):
                raise
            captured = self._captured[signature] = alone
            plan = self.road.plan(captured, call, situation, advise=False)
        self._plans[signature, situation] = planned = self._with_runs(captured, plan)
        return planned

    def _with_runs(self, captured: CapturedCall, plan: Plan) -> _Planned:
        """The plan of a captured call with the runs that it schedules: not those of views alone."""
        step = plan.captured
        assert step is not None
        runs = captured.runs
        if len(runs) != len(step.regions):
            rewriting = step.rewriting_of_regions
            runs = tuple(run for run in runs if self._trace(run.region, rewriting).differentiated)
        return _Planned(captured, plan, runs)


@dataclass
class _Forward:
    """The state of one planned forward: how many planned runs of regions have begun or were left out."""

    planned: _Planned
    pending: PendingForward
    may_run_unplanned: bool
    runs: int = field(default=0)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the capture."""
        return self.planned.captured.notes

    @property
    def rewriting(self) -> Rewriting:
        """The passes and the precision of its regions."""
        captured = self.planned.plan.captured
        assert captured is not None
        return captured.rewriting_of_regions

    def next_run(
        self, run: RegionRun, trace: Callable[[RecordedRegion, Rewriting], JointGraph]
    ) -> tuple[JointGraph, RegionSchedule] | None:
        """The joint graph and the schedule of the next planned run of the same region with the same parameters; None
        where there is none. `trace` traces a region that was recorded on fakes, or once more under other guards."""
        plan = self.planned.plan
        captured = plan.captured
        assert captured is not None
        for number in range(self.runs, len(captured.regions)):
            joint = captured.regions[number]
            if self.planned.runs[number].parameter_ids != run.parameter_ids:
                continue
            if joint.trace.region is not run.region:
                joint = trace(run.region, captured.rewriting_of_regions).accumulating(joint.parameter_inputs)
            if joint.fingerprint == captured.regions[number].fingerprint:
                self.runs = number + 1
                return joint, plan.regions[number]
        return None


def _signature(call: Call) -> str:
    """A text that is equal for calls that may share a plan: shapes, dtypes and the state of autocast."""
    return f"{call_signature(call)} {autocast_state()}"

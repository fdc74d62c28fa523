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
from memopt.capture.outputs import hand_out
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.capture.rehearsal import Rehearsal, rehearse, undone
from memopt.capture.trace import trace
from memopt.emit.emit import emit_region
from memopt.emit.emitted import Emitted
from memopt.errors import CaptureError
from memopt.planning.plan import Plan
from memopt.planning.region_schedule import RegionSchedule
from memopt.planning.situation import Situation
from memopt.recent import Recent
from memopt.run.pending import PendingForward
from memopt.run.region_stub import recording
from memopt.run.road import Road
from memopt.run.under_way import UnderWay

_MOST_PLANS = 64
"""The number of plans that are kept, one for each signature and situation of a call."""
_MOST_VARIANTS = 1024
"""The number of emitted regions that are kept, one for each region and schedule."""


class TookAnotherWay(CaptureError):
    """A forward ran through other regions than those that were planned; the next one may run as planned."""


class BrokenCalls:
    """Plans and runs calls with graph breaks.

    The runs of regions in a forward are counted, and each has a schedule of its own, also where Dynamo compiles one
    region for several of them (a block that is called in a loop).
    """

    def __init__(
        self, model: nn.Module, to_capture: Callable[[], Callable[..., Any]], road: Road, *, unplanned_allowed: bool
    ) -> None:
        self.model, self.road, self.unplanned_allowed = model, road, unplanned_allowed
        self.ran_unplanned = False
        self._rehearsal: Rehearsal | None = None
        self._forward: _Forward | None = None
        self._plans: Recent[tuple[str, Situation], Plan] = Recent(_MOST_PLANS)
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

    def planned(self, call: Call, situation: Situation, plan: Plan) -> None:
        """Have further calls with the signature and the situation of this one run by a plan."""
        self._plans[_signature(call), situation] = plan

    def forget(self) -> None:
        """Drop all plans and emitted regions, so that every call is planned again."""
        self._plans.clear()
        self._emitted.clear()

    def run(self, under_way: UnderWay, capture: Callable[[], CapturedCall]) -> Any:
        """Run a call by its plan. Where there is none, `capture` records the regions, and the plan is made first.

        Raises `BudgetError`, `CaptureError`.
        """
        plan = under_way.fitting(
            lambda situation: self._plan_for(under_way.call, situation, capture), lambda plan: plan
        )
        self._forward = _Forward(plan, under_way.begin(plan))
        try:
            return self._compiled(*under_way.call[0], **under_way.call[1])
        finally:
            self._forward = None

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run one region of the present call: by the plan of this run, or, while the call is captured, unplanned."""
        if self._rehearsal is not None:
            return self._rehearsal.run(region, inputs)
        if not region.differentiable:
            return region.graph_module(*inputs)
        assert self._forward is not None, "a region runs outside of any call"
        try:
            emitted = self._next(region, self._forward)
        except CaptureError:
            if not self.unplanned_allowed:
                raise
            self.ran_unplanned = True
            return region.graph_module(*inputs)
        pending = self._forward.pending
        return hand_out(pending.hands_out(emitted.run(*inputs)), frozenset(), pending)

    def _next(self, region: RecordedRegion, forward: _Forward) -> Emitted:
        """The emitted region for the run that begins now. Raises `CaptureError` where that run was not planned."""
        joint, schedule = forward.next_run(region)
        key = region, schedule, joint.parameter_inputs
        if key not in self._emitted:
            self._emitted[key] = emit_region(joint, schedule, self.road.accumulation, {})
        return self._emitted[key]

    def _plan_for(self, call: Call, situation: Situation, capture: Callable[[], CapturedCall]) -> Plan:
        key = _signature(call), situation
        if key not in self._plans:
            self._plans[key] = self.road.plan(capture(), call, situation, advise=False)
        return self._plans[key]


@dataclass
class _Forward:
    """The state of one planned forward: how many runs of regions it has begun."""

    plan: Plan
    pending: PendingForward
    runs: int = field(default=0)

    def next_run(self, region: RecordedRegion) -> tuple[JointGraph, RegionSchedule]:
        """The joint graph and the schedule of the run of `region` that begins now."""
        captured = self.plan.captured
        assert captured is not None
        number, planned = self.runs, captured.regions
        if number < len(planned):
            joint = planned[number]
            if joint.trace.region is not region:  # recorded on fakes, or once more under other guards
                joint = trace(region, captured.rewriting_of_regions).accumulating(joint.parameter_inputs)
            if joint.fingerprint == planned[number].fingerprint:
                self.runs += 1
                return joint, self.plan.regions[number]
        raise TookAnotherWay(
            "the forward took another way than when it was planned: it depends on the values of its inputs outside "
            f"of any captured region, {'; '.join(captured.notes[:1])}; mend the graph break, or add 'plain' to allow "
            "to run it unplanned"
        )


def _signature(call: Call) -> str:
    """A text that is equal for calls that may share a plan: shapes, dtypes and the state of autocast."""
    return f"{call_signature(call)} {autocast_state()}"

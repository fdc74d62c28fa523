"""Training calls that are one region: recorded once for each set of shapes, emitted once for each situation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memopt.capture.dynamo import TooManyShapes, compile_call
from memopt.capture.inputs import Call
from memopt.capture.outputs import hand_out
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.emit.stepping import check_own_memory
from memopt.planning.plan import Plan
from memopt.planning.situation import Situation
from memopt.recent import Recent
from memopt.run.on_demand import Notice, run_withholding
from memopt.run.region_stub import recording
from memopt.run.road import EmittedCall, Road
from memopt.run.under_way import UnderWay


class _Captured(Exception):
    """Ends a call in which a region was to be recorded and not run."""

    def __init__(self, region: RecordedRegion) -> None:
        super().__init__()
        self.region = region


class WholeCalls:
    """Plans and runs calls without graph breaks.

    Dynamo's compiled code checks its guards on shapes and everything else that a recorded region depends on, and then
    calls the region's stub. The stub selects the code for the situation, so that a new one needs no new capture.
    """

    def __init__(self, to_capture: Callable[[], Callable[..., Any]], road: Road, *, differentiate_all: bool) -> None:
        self.to_capture, self.road, self.differentiate_all = to_capture, road, differentiate_all
        self.under_way: UnderWay | None = None
        self._plans: Recent[tuple[RecordedRegion, Situation], Plan] = Recent(_MOST)
        """The plans that were made before the first run of their call."""
        self._emitted: Recent[tuple[RecordedRegion, Situation], EmittedCall] = Recent(_MOST)
        self._captured: Recent[RecordedRegion, CapturedCall] = Recent(_MOST)
        self._notice = Notice()
        self._compiled = self._compile()

    def run(self, under_way: UnderWay) -> Any:
        """Run a planned call. Raises `GraphBreak` where it is not one region, `BudgetError`, `CaptureError`."""
        self.under_way = under_way
        try:
            return self._call(under_way.call)
        finally:
            self.under_way = None

    def capture(self, call: Call) -> CapturedCall | None:
        """Record a call without running it; None where torch.compile passes it over. Raises `GraphBreak`."""
        assert self.under_way is None
        try:
            self._call(call)
        except _Captured as captured:
            return self._captured_call(captured.region)
        return None

    def planned(self, captured: CapturedCall, situation: Situation, plan: Plan) -> None:
        """Have the first run in this situation use a plan that was made ahead."""
        self._plans[captured.runs[0].region, situation] = plan

    def forget(self) -> None:
        """Drop all plans and emitted code, so that calls are planned again; recorded regions are kept."""
        self._plans.clear()
        self._emitted.clear()

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run the region of the present call by the plan for its situation, and return its outputs."""
        if self.under_way is None:
            raise _Captured(region)
        if not region.differentiable:
            return region.graph_module(*inputs)
        emitted = self._emitted_for(region, self.under_way)
        plan = emitted.plan
        check_own_memory(inputs, plan.regions[0].steps)
        forward = self.under_way.begin(plan)
        outputs = run_withholding(region, emitted.region.run, inputs, self._notice, forward)
        return hand_out(outputs, region.undifferentiated, forward)

    def _emitted_for(self, region: RecordedRegion, under_way: UnderWay) -> EmittedCall:
        emitted = self._emitted_in(region, under_way.call, under_way.situation)
        if under_way.is_too_tight(emitted.plan):
            emitted = self._emitted_in(region, under_way.call, under_way.crowded)
        return emitted

    def _emitted_in(self, region: RecordedRegion, call: Call, situation: Situation) -> EmittedCall:
        key = region, situation
        if key not in self._emitted:
            captured = self._captured_call(region)
            self._emitted[key] = self.road.travel(captured, call, situation, self._plans.get(key))
        return self._emitted[key]

    def _captured_call(self, region: RecordedRegion) -> CapturedCall:
        if region not in self._captured:
            self._captured[region] = CapturedCall.of(region)
        return self._captured[region]

    def _compile(self) -> Callable[..., Any]:
        backend = recording(self, differentiate_all=self.differentiate_all)
        return compile_call(self.to_capture(), backend, whole=True)

    def _call(self, call: Call) -> Any:
        try:
            return self._compiled(*call[0], **call[1])
        except TooManyShapes:
            self._compiled = self._compile()
            return self._compiled(*call[0], **call[1])


_MOST = 512
"""The number of pairs of region and situation whose code is kept: more sets of shapes than Dynamo keeps."""

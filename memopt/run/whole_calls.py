"""Training calls that are one region: recorded once for shapes of one kind, emitted for each situation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from memopt.capture.dynamic_shapes import Place, all_places, markable, marked
from memopt.capture.dynamo import TooManyShapes, compile_call
from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.capture.inputs import Call
from memopt.capture.outputs import hand_out
from memopt.capture.region import CapturedCall, RecordedRegion, Sizes
from memopt.compat.fsdp import is_fully_sharded
from memopt.emit.stepping import check_own_memory
from memopt.errors import BudgetError
from memopt.garbage import rare_collections
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.recent import Recent
from memopt.run.call_in_progress import CallInProgress
from memopt.run.on_demand import Notice, run_withholding
from memopt.run.pending import PendingForward
from memopt.run.plans_by_size import PlansBySize
from memopt.run.region_stub import recording
from memopt.run.replay import Replay
from memopt.run.road import EmittedCall, Road
from memopt.run.size_bounds import SizeBounds, captured_for, insisted, places_of


class _Captured(Exception):
    """Ends a call in which a region was to be recorded and not run."""

    def __init__(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.region, self.inputs = region, inputs


class InsistsOnSizes(Exception):
    """Ends a call for whose sizes the graphs that were captured are not valid; `lines` holds the line of the model that
    insists on each of them."""

    def __init__(self, lines: dict[Place, str]) -> None:
        super().__init__()
        self.lines = lines


class WholeCalls:
    """Plans and runs calls without graph breaks.

    Dynamo's compiled code checks its guards on shapes and everything else that a recorded region depends on, and then
    calls the region's stub. The stub selects the code for the situation, so that a new one needs no new capture. Sizes
    that differ between calls are symbols of one region, with a few plans for sizes up to a ceiling.
    """

    def __init__(
        self,
        to_capture: Callable[[], Callable[..., Any]],
        road: Road,
        size_bounds: SizeBounds,
        notice: Notice,
        *,
        differentiate_all: bool,
    ) -> None:
        self.to_capture, self.road, self.differentiate_all = to_capture, road, differentiate_all
        self.in_progress: CallInProgress | None = None
        self.insists: dict[Place, str] = {}
        """The sizes that Dynamo took as constants though they had changed, each with the line of the model."""
        self._bounds, self._notice = size_bounds, notice
        self._marked: set[Place] = set()
        self._has_symbols = False
        # torch 2.13 cannot trace every DTensor whose sizes are symbols: of split models each size has its own capture.
        self._symbols = not is_tensor_parallel(road.planner.terms.model)
        self._plans: Recent[tuple[RecordedRegion, Situation, Sizes], Plan] = Recent(_MOST)
        """The plans that were made before the first run of their call."""
        self._emitted: Recent[tuple[RecordedRegion, Situation], PlansBySize] = Recent(_MOST)
        self._captured: Recent[tuple[RecordedRegion, Sizes], CapturedCall] = Recent(_MOST)
        self._compiled = self._compile()

    def run(self, in_progress: CallInProgress) -> Any:
        """Run a planned call.

        Raises `GraphBreak` where it is not one region, `InsistsOnSizes`, `BudgetError`, `CaptureError`.
        """
        self.in_progress = in_progress
        try:
            return self._call(in_progress.call)
        finally:
            self.in_progress = None

    def capture(self, call: Call) -> CapturedCall | None:
        """Record a call without running it; None where torch.compile passes it over. Raises `GraphBreak`."""
        assert self.in_progress is None
        try:
            self._call(call)
        except _Captured as captured:
            ceiling = self._bounds.ahead(captured.region, captured.inputs, call)
            return self._captured_call(captured.region, ceiling, captured.inputs, call)
        return None

    def planned(self, captured: CapturedCall, situation: Situation, plan: Plan) -> None:
        """Have the first run in this situation use a plan that was made ahead."""
        self._plans[captured.regions[0], situation, captured.ceiling] = plan

    def forget(self) -> None:
        """Drop all plans and emitted code, so that calls are planned again; recorded regions are kept."""
        self._plans.clear()
        self._emitted.clear()

    def use_road(self, road: Road) -> None:
        """Have recorded regions planned again, by another road."""
        self.road = road
        self.forget()

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run the region of the present call by the plan for its situation, and return its outputs."""
        self._has_symbols |= bool(region.changing)
        if self.in_progress is None:
            raise _Captured(region, inputs)
        if not region.differentiable:
            return region.graph_module(*inputs)
        self._check_sizes(region, inputs, self.in_progress.call)
        emitted = self._emitted_for(region, inputs, self.in_progress)
        plan = emitted.plan
        check_own_memory(inputs, plan.regions[0].steps)
        forward = self.in_progress.begin(plan, emitted.region.exchanges)

        def run(*values: Any) -> Any:
            return forward.note_outputs(emitted.region.run(*values))

        replay = self._replay(region, inputs, forward) if region.undifferentiated else None
        outputs = run_withholding(region, run, inputs, self._notice, forward)
        return hand_out(outputs, forward, replay, region.undifferentiated)

    def _replay(self, region: RecordedRegion, inputs: tuple[Any, ...], forward: PendingForward) -> Replay:
        """The second forward by which outputs get gradients that the plan does not differentiate."""
        planner, plan = self.road.planner, forward.plan
        prevented = ""
        if region.plain is None or is_fully_sharded(planner.terms.model):
            prevented = "the parameters are spread over ranks"
        elif self.road.accumulation.exchange is not None:
            prevented = "other ranks wait for the gradients of the loss"
        elif plan.regions[0].steps:
            prevented = "parameters are stepped within the backward"
        elif planner.terms.fuses and plan.captured is not None and plan.captured.draws:
            prevented = "the random numbers of compiled code cannot be drawn again"
        return Replay(region, inputs, forward, forward.before, prevented, planner.differentiate_outputs)

    def _check_sizes(self, region: RecordedRegion, inputs: tuple[Any, ...], call: Call) -> None:
        """Raise `InsistsOnSizes` where the graphs of a region are not valid for the sizes of its inputs."""
        sizes = region.sizes_of(inputs)
        if not region.allows(sizes):
            lines = region.forbids(sizes)
            found = {place: line for symbol, line in lines.items() for place in places_of(region, symbol, inputs, call)}
            raise InsistsOnSizes(found or dict.fromkeys(all_places(call), "torch"))

    def _emitted_for(self, region: RecordedRegion, inputs: tuple[Any, ...], in_progress: CallInProgress) -> EmittedCall:
        return in_progress.fitting(
            lambda situation: self._emitted_in(region, inputs, in_progress.call, situation),
            lambda emitted: emitted.plan,
            lambda situation: (region, situation) in self._emitted,
        )

    def _emitted_in(
        self, region: RecordedRegion, inputs: tuple[Any, ...], call: Call, situation: Situation
    ) -> EmittedCall:
        key = region, situation
        if key not in self._emitted:
            self.insists |= insisted(region, inputs, call, self._marked)
            self._emitted[key] = PlansBySize()
        plans = self._emitted[key]
        sizes = region.sizes_of(inputs)
        ceiling = plans.covering(sizes)
        if ceiling is None:
            ceiling = sizes
            if (region, situation, sizes) not in self._plans:
                above = self._bounds.above(region, inputs, call)
                ceiling = sizes if plans.is_refused(above) else above
        if ceiling in plans:
            return plans[ceiling]
        started = time.perf_counter()
        try:
            emitted = self._travel(region, ceiling, inputs, call, situation)
        except BudgetError:
            if ceiling == sizes:
                raise
            plans.refuse(ceiling)
            ceiling = sizes
            emitted = self._travel(region, ceiling, inputs, call, situation)
        plans.add(ceiling, emitted, time.perf_counter() - started)
        self._check_sizes(region, inputs, call)  # tracing may have found more conditions
        return emitted

    def _travel(
        self, region: RecordedRegion, ceiling: Sizes, inputs: tuple[Any, ...], call: Call, situation: Situation
    ) -> EmittedCall:
        captured = self._captured_call(region, ceiling, inputs, call)
        return self.road.emit_call(captured, call, situation, self._plans.get((region, situation, ceiling)))

    def _captured_call(
        self, region: RecordedRegion, ceiling: Sizes, inputs: tuple[Any, ...], call: Call
    ) -> CapturedCall:
        key = region, ceiling
        if key not in self._captured:
            self._captured[key] = captured_for(region, ceiling, inputs, call)
        return self._captured[key]

    def _compile(self) -> Callable[..., Any]:
        narrowed = self.road.planner.proposing.floats
        backend = recording(self, differentiate_all=self.differentiate_all, narrowed=narrowed)
        return compile_call(self.to_capture(), backend, whole=True, symbols=self._symbols)

    def _call(self, call: Call) -> Any:
        """Run the code that Dynamo has compiled for a call, or has it compile some."""
        changing = set()
        if self._symbols and not self._has_symbols:
            changing = markable(call, self._bounds.changing(call))
            self._marked |= changing
        with marked(call, changing), nullcontext() if len(self._emitted) else rare_collections():
            try:
                return self._compiled(*call[0], **call[1])
            except TooManyShapes:
                self.forget()
                self._captured.clear()
                self._compiled = self._compile()
                return self._compiled(*call[0], **call[1])


_MOST = 512
"""The number of pairs of region and situation whose code is kept: more sets of shapes than Dynamo keeps."""

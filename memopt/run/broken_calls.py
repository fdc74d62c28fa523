"""Training calls whose forward breaks into regions: planned all together, before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from memopt.capture.author_modes import autocast_state
from memopt.capture.data_sizes import SizeOutgrown
from memopt.capture.dynamic_shapes import known_places
from memopt.capture.dynamo import compile_call
from memopt.capture.inputs import Call, call_kind, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.outputs import hand_out
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun
from memopt.capture.rehearsal import Rehearsal, as_run_later, rehearse
from memopt.compat.fsdp import Gathered, exchange_in_words
from memopt.emit.emit import emit_region
from memopt.emit.emitted import Emitted
from memopt.errors import BudgetError, CaptureError
from memopt.planning.kept_blocks import beside_freed
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import RegionSchedule
from memopt.planning.terms import Situation
from memopt.progress import stage
from memopt.recent import Recent
from memopt.rewrite.trace import forward_as_planned
from memopt.run.call_in_progress import CallInProgress
from memopt.run.control_paths import ControlPaths
from memopt.run.keeping import Keeping
from memopt.run.pending import PendingForward
from memopt.run.planned_runs import PlannedRuns
from memopt.run.region_stub import recording
from memopt.run.road import Road
from memopt.training_state import ForwardState, undone, values_restored

_Kind = tuple[str, int, CapturedCall | None]
_Variant = tuple[RecordedRegion, RegionSchedule, frozenset[int], tuple[tuple[str, int], ...]]
"""A region, its schedule, the numbers of the parameters to whose `.grad` it adds, and the limits of sizes within it."""
_MOST_PLANS = 64
"""The number of plans that are kept, one for each signature and situation of a call."""
_ATTEMPTS = 8
"""How often a forward is begun that takes another path than planned: each time its regions are captured once more."""
_MOST_VARIANTS = 1024
"""The number of emitted regions that are kept, one for each region and schedule."""


class OtherPathTaken(CaptureError):
    """A forward ran through other regions than those that were planned, repeatedly from the same state."""


class BrokenCalls:
    """Plans and runs calls with graph breaks.

    The runs of regions in a forward are counted, and each has a schedule of its own, also where Dynamo compiles one
    region for several of them (a block that is called in a loop). A forward may leave out runs that are planned. One
    that has others, or larger ones, is undone, captured, and planned together with those before it, so that after a few
    steps one plan serves every path through the model's code. Sizes that differ between runs are symbols of one region.
    """

    def __init__(
        self,
        model: nn.Module,
        to_capture: Callable[[], Callable[..., Any]],
        road: Road,
        keeping: Keeping,
        *,
        unplanned_allowed: bool,
    ) -> None:
        self.model, self.road, self.unplanned_allowed = model, road, unplanned_allowed
        self.keeping = keeping
        self.ran_unplanned = False
        self._rehearsal: Rehearsal | None = None
        self._forward: _Forward | None = None
        self._paths: Recent[_Kind, ControlPaths] = Recent(_MOST_PLANS)
        """The paths that calls of a kind were seen to take."""
        self._plans: Recent[tuple[CapturedCall, Situation], PlannedRuns] = Recent(_MOST_PLANS)
        self._emitted: Recent[_Variant, Emitted] = Recent(_MOST_VARIANTS)
        self._written: set[int] = set()
        """The numbers of the tensors of calls that forwards were seen to write to."""
        self._plans_freed = 0
        """The number of plans that were made when solvers were last freed."""
        self._backend = recording(self, differentiate_all=True)
        self._compiled = compile_call(to_capture(), self._backend, whole=False, symbols=True)

    def capture(self, call: Call, reason: str) -> CapturedCall:
        """Record the regions of a call by running it without gradients; changes to the model and to the tensors of the
        call are then undone. Other ranks need not do the same.

        `reason` says why the call is not one region. Raises `CaptureError`.
        """
        found = as_run_later(partial(self._rehearsed, call, reason), self._backend)
        return replace(found, kept=self.keeping.kept)

    def _rehearsed(self, call: Call, reason: str) -> CapturedCall:
        gathered = Gathered(self.model)
        forward_of = partial(forward_as_planned, rewriting=self.road.planner.terms.rewriting)
        self._rehearsal = Rehearsal(forward_of=forward_of, gathered=gathered)
        inputs_kept = values_restored(tensors_in(call), self._written)
        try:
            with undone(self.model), inputs_kept, gathered.without_exchange():
                return rehearse(lambda: self._compiled(*call[0], **call[1]), self._rehearsal, self.model, reason)
        finally:
            self._rehearsal = None

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have further calls of the kind of this one run by a plan in that situation."""
        paths = self._paths.get(self._kind(call))
        if paths is None:
            self._paths[self._kind(call)] = ControlPaths.of(captured, call)
        else:
            paths.calls.insert(0, captured)
        self._plans[captured, situation] = self._with_runs(captured, plan)

    def forget(self) -> None:
        """Drop all plans and emitted regions, so that every call is planned again."""
        self._plans.clear()
        self._emitted.clear()

    def use_road(self, road: Road) -> None:
        """Have recorded regions planned again, by another road."""
        self.road, self._plans_freed = road, 0
        self.forget()

    def forget_plans(self, but: Plan | None) -> None:
        """Drop all plans but one; emitted regions are kept."""
        kept = [(key, planned) for key, planned in self._plans.items() if planned.plan is but]
        self._plans.clear()
        for key, planned in kept:
            self._plans[key] = planned

    def run(self, in_progress: CallInProgress, capture: Callable[[], CapturedCall]) -> Any:
        """Run a call by its plan. Where there is none, `capture` records the regions, and the plan is made first.

        Raises `BudgetError`, `CaptureError`.
        """
        self.keeping.decide(lambda freed: self._fitting(in_progress, self._paths_of(in_progress.call, capture), freed))
        return self._run_a_path(in_progress, self._paths_of(in_progress.call, capture))

    def _run_a_path(self, in_progress: CallInProgress, paths: ControlPaths) -> Any:
        """Run a call one of these paths, or another one that is captured then."""
        before = ForwardState.of(self.model, tensors_in(in_progress.call), self._written)
        untried, captured = list(paths.calls), False
        # Other ranks go on with a forward that gathers parameters, so that it cannot be begun again.
        attempts = 1 if Gathered(self.model) else _ATTEMPTS
        for attempt in range(attempts):
            path = untried.pop(0)
            paths.use(path)
            try:
                return self._run(in_progress, paths, last=attempt == attempts - 1)
            except OtherPathTaken:
                if attempt == attempts - 1 or not before.can_be_undone():
                    raise
                before.undo()
            if not untried and not (captured and paths.separate()):
                paths.add(self._captured_again(paths, in_progress.call), in_progress.call)
                captured = True
            untried = untried or paths.calls[:1]
        raise AssertionError("the last attempt returns or raises")

    def _paths_of(self, call: Call, capture: Callable[[], CapturedCall]) -> ControlPaths:
        """The paths known for calls of the kind of this one, among them one for sizes as large as its own."""
        paths = self._paths.get(self._kind(call))
        if paths is None:
            paths = self._paths[self._kind(call)] = ControlPaths.of(capture(), call)
        elif not paths.sizes.cover(call):
            paths.add(self._captured_again(paths, call), call)
        return paths

    def _kind(self, call: Call) -> _Kind:
        """Equal for calls that may share a plan: all but their sizes, the state of autocast, what is exchanged between
        ranks, and what is kept gathered. Calls that keep blocks are captured again where those that free them were:
        Dynamo's graphs may be others since then."""
        text = f"{call_kind(call)} {autocast_state()} {exchange_in_words(self.model)}"
        return text, len(self.keeping.kept), self.keeping.freed if self.keeping.kept else None

    def _captured_again(self, paths: ControlPaths, call: Call) -> CapturedCall:
        """The regions of a call that runs now, on its values: as it will take them."""
        with stage("capturing"):
            return self.capture(call, paths.calls[0].break_reason)

    def _run(self, in_progress: CallInProgress, paths: ControlPaths, *, last: bool) -> Any:
        """Run a call the first of these paths; `last`: there is no further attempt after it."""
        planned = self._fitting(in_progress, paths)
        pending = in_progress.begin(planned.plan)
        pending.gathered = gathered = Gathered(self.model)
        pending.whole_gradients = gathered.gradient_bytes
        self._forward = _Forward(planned, pending, may_run_unplanned=last and self.unplanned_allowed)
        try:
            return self._compiled(*in_progress.call[0], **in_progress.call[1])
        except OtherPathTaken:
            pending.after_backward()  # it will have none
            raise
        finally:
            self._forward = None

    def _fitting(self, in_progress: CallInProgress, paths: ControlPaths, freed: Plan | None = None) -> PlannedRuns:
        """The plan for a call that fits beside what else is on the device. `freed` is the one that frees all blocks,
        where this one may keep some. Raises `BudgetError`, `CaptureError`."""
        try:
            return in_progress.fitting(
                lambda situation: self._plan_for(in_progress.call, situation, paths, freed),
                lambda planned: planned.plan,
                lambda situation: (paths.calls[0], situation) in self._plans,
            )
        except BudgetError:  # those that follow must not be planned to be as large as this one
            self._paths.drop(self._kind(in_progress.call))
            raise
        finally:
            self._free_solvers()

    def run_region(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> Any:
        """Run one region of the present call: by the plan of this run, or, while the call is captured, unplanned."""
        if self._rehearsal is not None:
            return self._rehearsal.run(region, inputs)
        if not region.differentiable:
            return region.graph_module(*inputs)
        forward = self._forward
        assert forward is not None, "a region runs outside of any call"
        emitted = self._next(RegionRun.of(region, inputs), forward)
        if emitted is None and not self._trace(region, forward.planned.rewriting).differentiated:
            return region.graph_module(*inputs)  # views of its inputs: no plan has a place for them
        if emitted is None and forward.may_run_unplanned:
            self.ran_unplanned = True
            return region.graph_module(*inputs)
        if emitted is None:
            raise OtherPathTaken(
                "the forward took another path than when it was planned, from the same inputs and random numbers, "
                f"{'; '.join(forward.planned.captured.notes[:1])}; mend the graph break, or add 'plain' to allow to "
                "run it unplanned"
            )
        try:
            outputs = emitted.run(*inputs)
        except SizeOutgrown as outgrown:
            raise OtherPathTaken(
                f"a size that depends on data is larger than planned for: {outgrown}, from the same inputs and random "
                "numbers"
            ) from None
        return hand_out(forward.pending.note_outputs(outputs), forward.pending)

    def _next(self, run: RegionRun, forward: _Forward) -> Emitted | None:
        """The emitted region for the run that begins now; None where that run is not planned."""
        found = forward.planned.find(run, forward.runs, self._trace)
        if found is None:
            return None
        forward.runs = found.number + 1
        limits = forward.planned.limits(found.number) if run.region.depends_on_data else {}
        key = run.region, found.schedule, found.joint.parameter_inputs, tuple(sorted(limits.items()))
        if key not in self._emitted:
            self._emitted[key] = emit_region(found.joint, found.schedule, self.road.accumulation, limits)
        return self._emitted[key]

    def _trace(self, region: RecordedRegion, rewriting: Rewriting) -> JointGraph:
        return self.road.planner.traces.of(region, rewriting)

    def _plan_for(self, call: Call, situation: Situation, paths: ControlPaths, freed: Plan | None) -> PlannedRuns:
        """The plan for the first of these paths; for the one that was captured last alone where their runs together do
        not fit."""
        refused: BudgetError | None = None
        for captured in paths.smaller():
            planned = self._plans.get((captured, situation))
            if planned is not None:
                return planned
            try:
                plan = self._extended(paths.before(captured), captured, call, situation)
                plan = plan or self.road.plan(captured, call, situation, advise=False)
            except BudgetError as error:
                refused = error.with_traceback(None)
                continue
            plan = beside_freed(plan, freed) if freed else plan
            planned = self._plans[captured, situation] = self._with_runs(captured, plan)
            paths.take(captured)
            return planned
        assert refused is not None
        raise refused

    def _free_solvers(self) -> None:
        """Free the solvers of the plans that were made since the last time: their tables would stay for the whole
        training."""
        if self.road.plans != self._plans_freed:
            self._plans_freed = self.road.plans
            self.road.planner.forget_solvers()

    def _extended(
        self, before: CapturedCall | None, captured: CapturedCall, call: Call, situation: Situation
    ) -> Plan | None:
        """The plan of a call by the schedules of the runs that were planned before; None where a search is needed."""
        planned = None if before is None else self._plans.get((before, situation))
        if planned is None:
            return None
        runs = self._scheduled(captured, planned.rewriting)
        return self.road.extend(planned.plan, captured, call, situation, known_places(planned.runs, runs))

    def _with_runs(self, captured: CapturedCall, plan: Plan) -> PlannedRuns:
        """The plan of a captured call with the runs that it schedules: not those of views alone."""
        step = plan.captured
        assert step is not None
        return PlannedRuns(captured, plan, self._scheduled(captured, step.rewriting_of_regions))

    def _scheduled(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[RegionRun, ...]:
        return tuple(run for run in captured.runs if self._trace(run.region, rewriting).differentiated)


@dataclass
class _Forward:
    """The state of one planned forward: how many planned runs of regions have begun or were left out."""

    planned: PlannedRuns
    pending: PendingForward
    may_run_unplanned: bool
    runs: int = field(default=0)

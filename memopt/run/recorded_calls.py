"""Training calls that Dynamo has recorded, in one region or in several, and which run by their plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from memopt.capture.captured_call import CapturedCall, RegionRun
from memopt.capture.data_sizes import SizeOutgrown
from memopt.capture.dry_run import DryRun, as_run_later, cut_off, record_dry_run
from memopt.capture.dynamo import TooManyShapes, compile_call, training_call
from memopt.capture.dynamo_graph import is_tensor_parallel
from memopt.capture.inputs import Call, marked, tensors_in
from memopt.capture.region import RecordedRegion
from memopt.compat.autograd import next_node_number
from memopt.compat.fsdp import Gathered, is_fully_sharded
from memopt.compat.tensors import as_implemented, weak_storages
from memopt.emit.emit import Emitted, check_own_memory, emit_region
from memopt.errors import BudgetError, CaptureError
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.schedule_parts import RegionSchedule
from memopt.planning.terms import Situation
from memopt.progress import rare_collections, stage
from memopt.rewrite.trace import forward_as_planned
from memopt.run.call_in_progress import CallInProgress
from memopt.run.changed_inputs import WatchedInputs
from memopt.run.control_paths import ControlPaths, PlansOfPaths
from memopt.run.executable import Executable
from memopt.run.hosted import bring_back, placed
from memopt.run.on_demand import Notice, run_deferring
from memopt.run.pending import PendingForward
from memopt.run.plans_of_regions import PlansOfRegions, RegionRecorded
from memopt.run.replay import Replay, hand_out
from memopt.run.road import Road
from memopt.run.second_run import SecondRun, WeakInputs
from memopt.run.sharding import Keeping
from memopt.run.sizes import SizeBounds
from memopt.saved_values import values_restored
from memopt.training_state import ForwardState, containers_restored, contents_of, refill, undone
from memopt.units import size

_Variant = tuple[RecordedRegion, RegionSchedule, frozenset[int], bool, tuple[tuple[str, int], ...]]
"""A region, its schedule, the numbers of the parameters to whose `.grad` it adds, whether gradients exist before, and
the limits of sizes."""
_ATTEMPTS = 8
"""The most attempts for a forward that takes another path than planned; after each its regions are captured again."""
_MOST_VARIANTS = 1024
"""The number of emitted regions that are kept, one for each region and schedule."""
_UNPLANNED_BETWEEN = "the unplanned tensors of code between the regions"


class OtherPathTaken(CaptureError):
    """Raised where a forward runs regions or sizes that are not in its plan. If the forward can be undone, it is begun
    again, with a plan for another path, a few times at most."""


class HoldsMore(OtherPathTaken):
    """Raised where eager code between the regions of a forward holds so much more than when it was captured that the
    step exceeds the budget by `nbytes`, for instance because sizes in that code depend on values."""

    def __init__(self, message: str, nbytes: int) -> None:
        super().__init__(message)
        self.nbytes = nbytes


def recording(
    run_region: Callable[..., Any],
    *,
    differentiate_all: bool,
    narrowed: torch.dtype | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo backend that records each region and returns a stub for it, which calls `run_region` with the region and
    its inputs. The keyword arguments are those of `RecordedRegion.record`.

    Nothing else is done within Dynamo's callback: the region is traced and planned when its stub is first called."""

    def backend(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        region = RecordedRegion.record(graph_module, inputs, differentiate_all=differentiate_all, narrowed=narrowed)
        return partial(run_region, region)

    return backend


@dataclass
class _Forward:
    """A planned forward that is running."""

    pending: PendingForward
    planned: Executable
    may_run_unplanned: bool = False
    runs: int = 0
    """The number of planned runs of regions that have begun or were left out."""


class RecordedCalls:
    """Records calls of a model in one region (`whole`) or in several, and runs them by plans.

    Dynamo's compiled code checks its guards on shapes and everything else that a recorded region depends on, and then
    calls the region's stub, which runs the code that is emitted for it by the plan of the call. For a call in one
    region the plan is chosen in the stub, since the guards tell which region it is. Several regions are planned
    together before the first of them runs; a forward that takes another path is undone and started again."""

    def __init__(self, road: Road, keeping: Keeping, bounds: SizeBounds, notice: Notice, *, whole: bool) -> None:
        self.model, self.road, self.keeping, self.whole = road.planner.terms.model, road, keeping, whole
        self._differentiate_all = road.planner.differentiate_all or not whole
        self.regions = PlansOfRegions(road, bounds)
        self.paths = PlansOfPaths(road, keeping, self._captured_again)
        self.ran_unplanned = False
        self._notice = notice
        self._in_progress: CallInProgress | None = None
        self._most_between: Callable[[], float] | None = None
        """Returns the bytes that code between the regions of the current call may hold while it is recorded."""
        self._forward: _Forward | None = None
        self._dry_run: DryRun | None = None
        self._emitted: LruCache[_Variant, Emitted] = LruCache(_MOST_VARIANTS)
        self._written: set[int] = set()
        """The numbers of the tensors of calls that forwards were seen to write to."""
        self.has_symbols = False
        """Whether changing sizes are symbols in the recorded graphs, so that these serve further sizes."""
        self.changes_objects: bool | None = None
        """Whether recorded code changes Python objects (`RecordedRegion.changes_objects`), so that no part of it may
        run a second time; None before any was recorded."""
        # torch 2.13 cannot trace every DTensor whose sizes are symbols: of split models each size has its own capture.
        self._symbols = not (whole and is_tensor_parallel(self.model))
        self._compile()

    def _compile(self) -> None:
        floats = self.road.planner.optimizer_choice.floats
        narrowed = floats if self.whole else None
        to_capture = training_call(self.model, self.road.planner.loss_fn, floats)
        self._backend = recording(self.run_region, differentiate_all=self._differentiate_all, narrowed=narrowed)
        self._compiled = compile_call(to_capture, self._backend, whole=self.whole, symbols=self._symbols)

    def capture_whole(self, call: Call) -> CapturedCall | None:
        """Capture a call as one region without running it; None where torch.compile does not compile the model. Raises
        `GraphBreak` where the call is not one region."""
        assert self._in_progress is None
        try:
            self.run_whole(call, None)
        except RegionRecorded as recorded:
            return self.regions.ahead(recorded.region, recorded.inputs, call)
        return None

    def capture(self, call: Call, reason: str, most_bytes: float = math.inf) -> CapturedCall:
        """Capture the regions of a call by running it without gradients; changes to the model and to the call's tensors
        are undone afterwards. Other ranks need not capture at the same time.

        `reason` says why the call is not one region. Raises `CaptureError` where eager code between the regions holds
        more than `most_bytes`, or the call cannot be captured."""
        found = as_run_later(partial(self._run_dry, call, reason, most_bytes), self._backend)
        return replace(found, kept=self.keeping.kept)

    def _run_dry(self, call: Call, reason: str, most_bytes: float) -> CapturedCall:
        gathered = Gathered(self.model)
        forward_of = partial(forward_as_planned, rewriting=self.road.planner.terms.rewriting)
        bring_back(self.model)
        self._dry_run = DryRun(forward_of=forward_of, gathered=gathered, most_bytes=most_bytes)
        inputs_kept = values_restored(tensors_in(call), self._written)
        try:
            with undone(self.model), inputs_kept, containers_restored(call), gathered.without_exchange():
                args, kwargs = cut_off(call)
                return record_dry_run(lambda: self._compiled(*args, **kwargs), self._dry_run, self.model, reason)
        finally:
            self._dry_run = None

    def _captured_again(self, call: Call, reason: str) -> CapturedCall:
        """Capture a call on its values right before it runs, so that it runs the captured regions."""
        with stage("capturing"):
            return self.capture(call, reason, self._most_between() if self._most_between else math.inf)

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Make later calls of the same kind as `call` run, in this situation, by `plan`, which was made before their
        first run."""
        if self.whole:
            self.regions.planned(captured, situation, plan)
        else:
            self.paths.planned(captured, call, situation, plan)

    def forget(self) -> None:
        """Drop all plans and emitted code, so that every call is planned again; captured regions stay."""
        self.forget_plans(but=None)
        self._emitted.clear()

    def forget_plans(self, but: Plan | None) -> None:
        """Drop the plans of calls in one region, with their code, and the plans of calls in several regions, except
        `but` if given. The code that was emitted for calls in several regions stays."""
        self.regions.forget()
        self.paths.forget(but)

    def use_road(self, road: Road) -> None:
        """Drop the plans, and plan recorded regions again by `road`, which takes a captured call from graphs to emitted
        code."""
        self.road = self.regions.road = road
        self.forget()
        self.paths.use_road(road)

    def run(self, in_progress: CallInProgress, first: Callable[[], CapturedCall]) -> Any:
        """Run a call in several regions by its plan, which is made first if there is none. `first` captures the call if
        it is the first of its kind.

        Raises `BudgetError` where no plan fits, and `CaptureError` where the call cannot be captured."""
        bring_back(self.model)
        fitting, call, self._most_between = self.paths.fitting, in_progress.call, in_progress.most_between
        try:
            self.keeping.decide(lambda freed: fitting(in_progress, self.paths.of(call, first), freed))
            return self._run_a_path(in_progress, self.paths.of(call, first))
        finally:
            self._most_between = None  # it keeps the call alive

    def run_whole(self, call: Call, in_progress: CallInProgress | None) -> Any:
        """Run the code that Dynamo has compiled for a call in one region, or has it compile some: by its plan, which is
        made first if there is none, if the call is `in_progress`; else until its region begins (`RegionRecorded`).

        Raises `BudgetError` where no plan fits, `CaptureError` where the call cannot be captured, `GraphBreak` where it
        is not one region, and `Insists` where the captured graphs are not valid for its sizes."""
        changing = self.regions.changing(call) if self._symbols and not self.has_symbols else ()
        marks = marked(call, changing) if changing else nullcontext()
        self._in_progress = in_progress
        try:
            with marks, nullcontext() if self.regions.runs else rare_collections():
                try:
                    return self._compiled(*call[0], **call[1])
                except TooManyShapes:
                    self.regions.forget(captured=True)
                    self._compile()
                    return self._compiled(*call[0], **call[1])
        finally:
            self._in_progress = None

    def _run_a_path(self, in_progress: CallInProgress, paths: ControlPaths) -> Any:
        """Run a call along one of these paths. Where it takes none of them, it is undone, the path that it takes is
        captured, and it is begun again, `_ATTEMPTS` times at most."""
        before = ForwardState.of(self.model, tensors_in(in_progress.call), self._written)
        contents = contents_of(in_progress.call)
        untried, captured = list(paths.calls), False
        # Other ranks go on with a forward that gathers parameters, so that it cannot be begun again.
        attempts = 1 if Gathered(self.model) else _ATTEMPTS
        for attempt in range(attempts):
            path = untried.pop(0)
            paths.calls = [path, *(other for other in paths.calls if other is not path)]
            try:
                return self._run_path(in_progress, paths, last=attempt == attempts - 1)
            except Exception as failed:
                if undone := attempts > 1 and before.can_be_undone():
                    before.undo()
                    refill(contents)
                if isinstance(failed, CaptureError):
                    failed.undone = undone
                if isinstance(failed, HoldsMore) and not undone:
                    budget = in_progress.moment.entry.budget_bytes
                    raise BudgetError(budget, budget + failed.nbytes, _UNPLANNED_BETWEEN, least=False) from None
                if not (undone and isinstance(failed, OtherPathTaken)) or attempt == attempts - 1:
                    raise
            if not untried and not (captured and paths.separate()):
                paths.add(self._captured_again(in_progress.call, paths.calls[0].break_reason), in_progress.call)
                captured = True
            untried = untried or paths.calls[:1]
        raise AssertionError("not reached: the last attempt returns or raises")

    def _run_path(self, in_progress: CallInProgress, paths: ControlPaths, *, last: bool) -> Any:
        """Run a call along the first of these paths. `last`: there is no further attempt, so that the call may run
        unplanned if `allow` has "plain". Raises `OtherPathTaken` where it takes another path."""
        planned = self.paths.fitting(in_progress, paths)
        pending = in_progress.begin(planned.plan)
        pending.gathered = gathered = Gathered(self.model)
        pending.whole_gradients = gathered.gradient_bytes
        pending.first_node = next_node_number()
        unplanned = last and "plain" in self.road.planner.terms.options.allow
        self._forward = _Forward(pending, planned, may_run_unplanned=unplanned)
        try:
            result = self._compiled(*in_progress.call[0], **in_progress.call[1])
            lacking = paths.lacking(planned.plan, pending.note_made_between(result))
            if lacking > 0 and not gathered and self.road.accumulation.exchange is None:  # other ranks would go on
                raise HoldsMore(
                    "eager code between the regions of the forward holds more than when it was captured, so that the "
                    f"step exceeds the budget by {size(lacking)}; give a budget larger by that",
                    lacking,
                )
            return result
        except Exception:
            pending.after_backward()  # it gets no backward
            raise
        finally:
            self._forward = None

    def run_region(self, region: RecordedRegion, *inputs: Any) -> Any:
        """Run one region of the current call by its plan, or without one while the call is being captured."""
        region = region.as_called()
        if self._dry_run is not None:
            return self._dry_run.run(region, inputs)
        self.has_symbols |= bool(region.changing)
        self.changes_objects = bool(self.changes_objects) or region.changes_objects
        if self.whole and self._in_progress is None:
            raise RegionRecorded(region, inputs)
        for number in region.to_require_grad:
            inputs[number].requires_grad_()
        if not region.differentiable:
            return region.graph_module(*inputs)
        if (forward := self._forward) is None:
            assert self._in_progress is not None, "a region runs, but no call of its model is in progress"
            found = self.regions.fitting(region, inputs, self._in_progress)
            if stepped := found.plan.regions[0].steps:
                check_own_memory(inputs, stepped)
            exchanges = found.region.exchanges if found.region else 0
            forward = _Forward(self._in_progress.begin(found.plan, exchanges), found)
        emitted = forward.planned.region or self._next(region, inputs, forward)
        if emitted is None:
            return region.graph_module(*inputs)
        pending, own_run, weak = forward.pending, emitted.run, None
        if self._in_progress is not None:
            moment = self._in_progress.moment
            weak = WeakInputs.of(inputs, moment.inputs)
            if self._may_run_twice(pending) and (step := pending.plan.captured) is not None:
                written = region.written | set(step.regions[0].statistics)
                pending.second_run = SecondRun.of(written, inputs, weak, own_run, pending.before)
            if region.changed is None:
                watched = WatchedInputs.of(region, inputs, self.model, self._plan_again)
                copies = watched.copies(pending.plan, moment)
                inputs = tuple(copies.get(number, value) for number, value in enumerate(inputs))
                pending.backward_begins, pending.copies = watched.look, tuple(weak_storages(copies.values()))
                weak = WeakInputs.of(inputs, moment.inputs) if copies else weak
            inputs = placed(inputs, pending.plan.regions[0].hosted)

        def run(*values: Any) -> Any:
            return pending.note_outputs(own_run(*values))

        asked = self.whole or region.undifferentiated or region.feeds
        replay = self._replay(region, inputs, weak, pending) if asked else None
        try:
            before = pending.before if self.whole else None
            outputs = run_deferring(region, run, inputs, self._notice, pending, before)
        except SizeOutgrown as outgrown:
            pending.after_backward()  # it gets no backward
            if self.whole:
                raise
            raise OtherPathTaken(
                f"a size that depends on data is larger than planned for ({outgrown}), though the forward began again "
                "from the same inputs and random numbers; compute that size only from these"
            ) from None
        with as_implemented():  # deferred outputs are looked at without their values
            return hand_out(outputs, pending, replay, region.undifferentiated, region.feeds)

    def _may_run_twice(self, forward: PendingForward) -> bool:
        """Whether a forward in one region may be run a second time by its plan, so that its saved values can be freed
        until its backward: the second run must give the same values, and no other rank may take part."""
        terms, allow = self.road.planner.terms, self.road.planner.terms.options.allow
        alone = self.road.accumulation.exchange is None and not is_fully_sharded(terms.model)
        own_values = not any(one.steps or one.hosted for one in forward.plan.regions)
        return "recompute" in allow and alone and own_values and not terms.fuses and "fp8" not in allow

    def _plan_again(self) -> None:
        """Have calls in one region planned again, after the caller has changed an input in place."""
        self.regions.forget()
        self.road.planner.forget_sizes()

    def _next(self, region: RecordedRegion, inputs: tuple[Any, ...], forward: _Forward) -> Emitted | None:
        """The code for the run of a region that begins now, in a call of several; None for one that runs as captured:
        it only makes views of its inputs, or it is not planned and the call may run unplanned.

        Raises `OtherPathTaken` where that run is not planned.
        """
        planned, trace = forward.planned, self.paths.trace
        found = planned.find(RegionRun.of(region, inputs), forward.runs, trace)
        if found is None:
            if not trace(region, planned.rewriting).differentiated:
                return None
            if forward.may_run_unplanned:
                self.ran_unplanned = True
                return None
            raise OtherPathTaken(
                "the forward took another path than when it was planned, though it began again from the same inputs "
                f"and random numbers (calls are {'; '.join(planned.captured.notes[:1])}); mend the graph break, or add "
                "'plain' to allow to run it unplanned"
            )
        forward.runs = found.number + 1
        limits, plan = planned.limits(found.number) if region.depends_on_data else {}, planned.plan
        parameters, held = found.joint.parameter_inputs, plan.account.gradients_held
        key = region, found.schedule, parameters, held, tuple(sorted(limits.items()))
        if key not in self._emitted:
            self._emitted[key] = emit_region(found.joint, found.schedule, self.road.accumulation, limits, plan)
        return self._emitted[key]

    def _replay(
        self, region: RecordedRegion, inputs: tuple[Any, ...], weak: WeakInputs | None, forward: PendingForward
    ) -> Replay:
        """The second forward that gives gradients which the plan does not compute: those of outputs that it does not
        differentiate, and those with a graph of their own."""
        planner, plan, captured = self.road.planner, forward.plan, forward.plan.captured
        prevented = ""
        if not self.whole:
            prevented = "the forward breaks into several regions"
        elif region.plain is None or is_fully_sharded(planner.terms.model):
            prevented = "the parameters are sharded over ranks"
        elif self.road.accumulation.exchange is not None:
            prevented = "other ranks wait for the gradients of the loss"
        elif plan.regions[0].hosted:
            prevented = "parameters lie in the host's memory"
        elif plan.regions[0].steps:
            prevented = "parameters are stepped within the backward"
        elif planner.terms.fuses and captured is not None and captured.draws:
            prevented = "the random numbers of compiled code cannot be drawn again"
        joints = captured.regions if self.whole and captured is not None else ()
        only_read = joints[0].inputs_without_gradients if joints else ()
        noted = planner.differentiate_outputs
        return Replay(region, inputs, weak, forward, prevented, only_read, noted)

"""The control-flow paths that forwards have taken through a model's regions, and the plans of calls that take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial

from memopt.capture.caller_modes import CallerModes
from memopt.capture.captured_call import CapturedCall, RegionRun, known_places, together, with_eager_bytes
from memopt.capture.data_sizes import MARGIN
from memopt.capture.inputs import Call, call_kind, tensors_in
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.region import RecordedRegion
from memopt.compat.fsdp import exchange_in_words
from memopt.compat.tensors import storage_key
from memopt.errors import BudgetError
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.stages import beside_freed
from memopt.planning.terms import Situation
from memopt.rewrite.trace import traced_once
from memopt.run.call_in_progress import CallInProgress
from memopt.run.executable import Executable
from memopt.run.road import Road
from memopt.run.sharding import Keeping
from memopt.run.sizes import Shapes, cover, tensor_shapes

_MOST = 4
"""The number of paths that are kept: the latest ones."""


@dataclass(frozen=True)
class _LargestSizes:
    """The sizes of inputs up to which the bytes that eager code between regions holds are known: those captured, with a
    margin where sizes have grown."""

    shapes: Shapes

    def covering(self, call: Call) -> _LargestSizes:
        """These sizes, but where the call has a larger one, that one plus a margin (`MARGIN`)."""
        found = [
            tuple(most if size <= most else math.ceil(MARGIN * size) for most, size in zip(*pair, strict=True))
            for pair in zip(self.shapes, tensor_shapes(call), strict=True)
        ]
        return _LargestSizes(tuple(found))

    def scaled(self, captured: CapturedCall, call: Call) -> CapturedCall:
        """A copy of `captured`, the capture of `call`, whose bytes of eager code are scaled up from the sizes of `call`
        to these sizes."""
        own = tensor_shapes(call)
        if own == self.shapes:
            return captured
        pairs = [pair for shapes in zip(self.shapes, own, strict=True) for pair in zip(*shapes, strict=True)]
        growth = max([1.0, *(most / max(1, size) for most, size in pairs)])
        return with_eager_bytes(captured, min(growth, MARGIN))

    def input_bytes(self, call: Call) -> tuple[int, ...]:
        """The bytes of each of the call's tensors at these sizes."""
        found: dict[object, int] = {}
        for tensor, shape in zip(tensors_in(call), self.shapes, strict=True):
            nbytes = max(tensor.untyped_storage().nbytes(), math.prod(shape) * tensor.element_size())
            found[storage_key(tensor)] = max(nbytes, found.get(storage_key(tensor), 0))
        return tuple(found.values())


@dataclass
class ControlPaths:
    """The control-flow paths that calls of one kind have taken, each as a captured call. The first path, `calls[0]`, is
    the one by which the next forward runs.

    One path serves all forwards that run some or all of its regions, in its order. Two sequences of regions that cannot
    be merged into one path, such as other regions on the same parameters, are separate paths."""

    calls: list[CapturedCall]
    sizes: _LargestSizes
    """The largest inputs with which they were captured."""
    new: bool = False
    """Whether the next forward is that of the call that was just captured, on the same values."""
    between_bytes: int | None = None
    """The most bytes that code between the regions was found to hold after a forward that followed its capture; None
    before the first."""
    _margin: float = MARGIN
    _joins: dict[CapturedCall, tuple[CapturedCall, CapturedCall]] = field(default_factory=dict)
    """For each path made by merging a capture: the path that was first until then, and the capture."""

    @classmethod
    def of(cls, captured: CapturedCall, call: Call, *, new: bool = False) -> ControlPaths:
        """The paths of calls of one kind, so far only `captured`, the capture of `call`. `new`: the next forward is
        that of `call`, on the values with which it was captured (the field `new`)."""
        return cls([captured], _LargestSizes(tensor_shapes(call)), new=new)

    def add(self, captured: CapturedCall, call: Call) -> None:
        """Merge the capture `captured` of `call` into the first path, `calls[0]`, so that it serves `call` too. Where
        both have different regions for the same parameters, only the capture's are in the new path, and the old path is
        kept behind it."""
        self.sizes, self.new = self.sizes.covering(call), True
        captured = replace(captured, input_bytes=self.sizes.input_bytes(call))
        captured = self.sizes.scaled(captured, call)
        before = self.calls[0]
        roomier = with_eager_bytes(captured, self._margin) if _sizes_differ(before, captured) else captured
        both = together(before, roomier, self._margin)
        self._joins = {both: (before, captured)}
        kept = len([number for number in known_places(before.runs, both.runs) if number is not None])
        others = self.calls if kept < len(before.runs) else self.calls[1:]
        self.calls = [both, *others][:_MOST]

    def separate(self) -> CapturedCall | None:
        """Make the latest capture a path of its own, in front of the first path (`calls[0]`), into which it was merged:
        the merged path does not serve the captured call, since regions with equal operators can have different graphs
        for other sizes. Returns the capture; None where nothing was merged into the first path."""
        first = self.calls[0]
        if first not in self._joins or self._joins[first][1] is first:
            return None
        before, captured = self._joins[first]
        self._joins[captured] = before, captured
        self.calls = [captured, *self.calls][:_MOST]
        return captured

    def before(self, path: CapturedCall) -> CapturedCall | None:
        """The path that the latest capture was merged into to make `path`; None where nothing was merged."""
        return self._joins[path][0] if path in self._joins else None

    def lacking(self, plan: Plan, between_bytes: int) -> int:
        """The bytes by which the step of a forward that has just run exceeds its budget; 0 or less where it fits.
        `plan` is the plan of the first path (`calls[0]`), by which the forward ran. `between_bytes` is what eager code
        between the regions holds after the forward. If it held less when the path was captured, what it holds during
        the step is assumed to have grown in proportion."""
        if self.new:
            self.new, self.between_bytes = False, max(self.between_bytes or 0, between_bytes)
        captured = self.calls[0]
        planned = captured.ending.during if self.between_bytes is None else self.between_bytes
        if between_bytes <= planned:
            return 0
        most = max(captured.ending.before, *(nbytes for run in captured.runs for nbytes in astuple(run.eager)))
        grown = math.ceil(most * (between_bytes / planned - 1)) if planned else between_bytes
        return grown - (plan.budget_bytes - plan.ceiling_bytes)

    def smaller(self) -> Iterator[CapturedCall]:
        """Yields captured calls to plan for, from the one that serves most forwards to the smallest: the first path
        (`calls[0]`); and, if a capture was merged into it, the same path without a margin above the sizes seen, then
        the latest capture alone. Once it has yielded a path without a margin, `add` makes later ones without it too."""
        first = self.calls[0]
        yield first
        if first in self._joins:
            before, captured = self._joins[first]
            if self._margin > 1:
                self._margin = 1.0
                exact = together(before, captured, self._margin)
                self._joins[exact] = before, captured
                yield exact
            self._joins[captured] = before, captured
            yield captured


def _sizes_differ(one: CapturedCall, other: CapturedCall) -> bool:
    """Whether a run that both captures have has other input shapes in each."""
    numbers = known_places(one.runs, other.runs)
    pairs = ((one.runs[at], run) for at, run in zip(numbers, other.runs, strict=True) if at is not None)
    return any(ours.shapes != theirs.shapes for ours, theirs in pairs)


_Kind = tuple[str, int, CapturedCall | None]
_MOST_PLANS = 64
"""The number of kinds of calls that are kept, and of plans, one for each path and situation."""


class PlansOfPaths:
    """The plans of calls in several regions, by the control-flow path and the situation.

    Each run of a region in a forward has a schedule of its own, also where Dynamo compiles one region for several runs
    (a block that is called in a loop). A forward may leave out planned runs. A forward with other or larger runs is
    captured and planned together with earlier ones, so that after a few steps one plan serves every path through the
    model's code. Sizes that differ between runs are symbols of one region."""

    def __init__(self, road: Road, keeping: Keeping, capture: Callable[[Call, str], CapturedCall]) -> None:
        self.road, self.keeping, self.capture = road, keeping, capture
        self.paths: LruCache[_Kind, ControlPaths] = LruCache(_MOST_PLANS)
        """The paths that calls of a kind were seen to take."""
        self._plans: LruCache[tuple[CapturedCall, Situation], Executable] = LruCache(_MOST_PLANS)
        self._plans_freed = 0
        """The value of `Road.plans` when solvers were last freed."""

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have later calls of the same kind as `call` run by `plan` in this situation. Where a compiling backend emits
        the code, these calls are planned again, with the bytes that the compiled code holds."""
        paths = self.paths.get(self._kind(call))
        if paths is None:
            self.paths[self._kind(call)] = ControlPaths.of(captured, call)
        else:
            paths.calls.insert(0, captured)
        if not self.road.planner.terms.fuses:
            self._plans[captured, situation] = self._with_runs(captured, plan)

    def use_road(self, road: Road) -> None:
        """Drop the plans, and plan calls again by `road`, which takes a captured call from graphs to emitted code."""
        self.road, self._plans_freed = road, 0
        self._plans.clear()

    def forget(self, but: Plan | None) -> None:
        """Drop all plans except `but`, if that is given."""
        kept = [(key, planned) for key, planned in self._plans.items() if planned.plan is but]
        self._plans.clear()
        for key, planned in kept:
            self._plans[key] = planned

    def of(self, call: Call, first: Callable[[], CapturedCall]) -> ControlPaths:
        """The paths of calls of the same kind as `call`, captured for sizes no smaller than those of `call`. If there
        are no paths yet, `first` captures the call; if the call is larger than all earlier ones, it is captured and
        added to the paths."""
        paths = self.paths.get(self._kind(call))
        if paths is None:
            paths = self.paths[self._kind(call)] = ControlPaths.of(first(), call, new=True)
        elif not cover(paths.sizes.shapes, tensor_shapes(call)):
            paths.add(self.capture(call, paths.calls[0].break_reason), call)
        return paths

    def _kind(self, call: Call) -> _Kind:
        """A key that is equal for calls that share their paths: calls with the same arguments but for their sizes,
        state of autocast, exchanges between ranks, and number of blocks that stay gathered. Where blocks stay gathered,
        the key also has the capture with all blocks freed: if that capture is made again, Dynamo's graphs may differ,
        and the call is captured again."""
        text = f"{call_kind(call)} {CallerModes.now()} {exchange_in_words(self.road.planner.terms.model)}"
        return text, len(self.keeping.kept), self.keeping.freed if self.keeping.kept else None

    def fitting(self, in_progress: CallInProgress, paths: ControlPaths, freed: Plan | None = None) -> Executable:
        """A plan, ready to run, by which the call takes one of `paths`; it fits the budget together with all else on
        the device, and is made if no known plan does. `freed`: if FSDP2 keeps blocks gathered until the backward, the
        plan of the same call that keeps none; a new plan shows the smallest budget and the frontier of `freed`.

        Raises `BudgetError` where no plan fits, and `CaptureError` where the call cannot be captured."""
        try:
            make = partial(self._plan_for, in_progress.call, paths, freed)
            return in_progress.fitting(lambda situation, _: make(situation), lambda: self._known(paths.calls[0]))
        except BudgetError:  # later calls must not be planned for this one's size
            self.paths.pop(self._kind(in_progress.call), None)
            raise
        finally:
            if self.road.plans != self._plans_freed:  # else the solvers' tables would stay for the whole training
                self._plans_freed = self.road.plans
                self.road.planner.forget_solvers()

    def _known(self, captured: CapturedCall) -> dict[Situation, Executable]:
        """The plans of a path, by situation."""
        return {situation: planned for (path, situation), planned in self._plans.items() if path is captured}

    def _plan_for(self, call: Call, paths: ControlPaths, freed: Plan | None, situation: Situation) -> Executable:
        """The plan for the first of these paths in this situation; where that does not fit, for the first captured call
        of `ControlPaths.smaller` with a plan that fits, which then becomes the first path. `freed` is as for `fitting`.
        Raises `BudgetError` where none fits."""
        refused: BudgetError | None = None
        for captured in paths.smaller():
            planned = self._plans.get((captured, situation))
            if planned is not None:
                return planned
            try:
                plan = self._extended(paths.before(captured), captured, call, situation)
                plan = plan or self.road.plan_regions(captured, call, situation)
            except BudgetError as error:
                refused = error.with_traceback(None)
                continue
            plan = beside_freed(plan, freed) if freed else plan
            planned = self._plans[captured, situation] = self._with_runs(captured, plan)
            paths.calls[0] = captured
            return planned
        assert refused is not None
        raise refused

    def _extended(
        self, before: CapturedCall | None, captured: CapturedCall, call: Call, situation: Situation
    ) -> Plan | None:
        """The plan of `captured` with the schedules that its runs have in the plan of the path `before`; None where
        `before` has no plan in this situation, or a search is needed, as where the code of the runs is compiled."""
        planned = None if before is None else self._plans.get((before, situation))
        if planned is None or self.road.planner.terms.fuses:
            return None
        runs = self._scheduled(captured, planned.rewriting)
        return self.road.extend(planned.plan, captured, call, situation, known_places(planned.runs, runs))

    def _with_runs(self, captured: CapturedCall, plan: Plan) -> Executable:
        """The plan of a captured call with the runs that have a schedule: all that are differentiated."""
        step = plan.captured
        assert step is not None
        return self.road.ready(captured, plan, self._scheduled(captured, step.rewriting_of_regions))

    def _scheduled(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[RegionRun, ...]:
        return tuple(run for run in captured.runs if self.trace(run.region, rewriting).differentiated)

    def trace(self, region: RecordedRegion, rewriting: Rewriting) -> JointGraph:
        """The joint graph of a region under a rewriting."""
        planner = self.road.planner
        return traced_once(region, rewriting, planner.terms.call_backend(whole=False), planner.traces)

"""The control-flow paths that forwards have taken through a model's regions, and the plans of calls that take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, replace
from functools import partial

from torch import nn

from memopt.capture.author_modes import autocast_state
from memopt.capture.data_sizes import MARGIN
from memopt.capture.dynamic_shapes import known_places, together, with_eager_bytes
from memopt.capture.inputs import Call, call_kind
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun
from memopt.compat.fsdp import exchange_in_words
from memopt.errors import BudgetError
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.stages import beside_freed
from memopt.planning.terms import Situation
from memopt.run.executable import Executable
from memopt.run.fitting import CallInProgress
from memopt.run.road import Road
from memopt.run.sharding import Keeping
from memopt.run.sizes import LargestSizes

_MOST = 4
"""The number of paths that are kept: those that were taken last."""


@dataclass
class ControlPaths:
    """The control-flow paths that calls of one kind have taken, most recent first, each as a captured call.

    A path has the runs of many forwards, each of which leaves some of them out; forwards that run other regions on the
    same parameters take different paths."""

    calls: list[CapturedCall]
    sizes: LargestSizes
    """The largest inputs with which they were captured."""
    new: bool = False
    """Whether the next forward is one that was captured just before, on its values."""
    between_bytes: int | None = None
    """The most that code between the regions was found to hold after such a forward; None before the first."""
    _margin: float = MARGIN
    _joins: dict[CapturedCall, tuple[CapturedCall, CapturedCall]] = field(default_factory=dict)
    """What a path was made of: the path before, and a capture that was put to it."""

    @classmethod
    def of(cls, captured: CapturedCall, call: Call, *, new: bool = False) -> ControlPaths:
        """The first path that was seen; `new`: in a call that runs now."""
        return cls([captured], LargestSizes.of(call), new=new)

    def move_to_front(self, path: CapturedCall) -> None:
        """Move a path to the front of `calls`, so that it is tried first when such a call comes again."""
        self.calls = [path, *(other for other in self.calls if other is not path)]

    def add(self, captured: CapturedCall, call: Call) -> None:
        """Put the capture of a call to the path that was taken last; where that drops some of its runs, beside it."""
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
        """Put the latest capture by itself before the first path, which it was joined to and which does not serve it:
        regions of the same operators may have other graphs for other sizes. None where it is by itself."""
        first = self.calls[0]
        if first not in self._joins or self._joins[first][1] is first:
            return None
        before, captured = self._joins[first]
        self._joins[captured] = before, captured
        self.calls = [captured, *self.calls][:_MOST]
        return captured

    def before(self, path: CapturedCall) -> CapturedCall | None:
        """The path that was taken before the first one was captured; None where there was none."""
        return self._joins[path][0] if path in self._joins else None

    def lacking(self, plan: Plan, between_bytes: int) -> int:
        """The bytes that a step of the first path lacks under its plan, where code between the regions was found to
        hold `between_bytes` after the forward: more than after the one of which they were captured. What it holds at
        other times is taken to grow alike. 0 or less where it lacks none."""
        if self.new:
            self.new, self.between_bytes = False, max(self.between_bytes or 0, between_bytes)
        captured = self.calls[0]
        planned = captured.held_bytes if self.between_bytes is None else self.between_bytes
        if between_bytes <= planned:
            return 0
        most = max(captured.after_bytes, *(nbytes for run in captured.runs for nbytes in astuple(run.eager)))
        grown = math.ceil(most * (between_bytes / planned - 1)) if planned else between_bytes
        return grown - (plan.budget_bytes - plan.ceiling_bytes)

    def smaller(self) -> Iterator[CapturedCall]:
        """Captures to plan for, from the most general to the most special; the caller takes the next one where no plan
        of the one before fits the budget. They are the first path, in which sizes that differed between its captures
        have a margin above the largest that was seen; the same without the margin; and its latest capture by itself."""
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

    def take(self, path: CapturedCall) -> None:
        """Have a path take the place of the first."""
        self.calls[0] = path


def _sizes_differ(one: CapturedCall, other: CapturedCall) -> bool:
    """Whether a run has other sizes in one of two captures."""
    numbers = known_places(one.runs, other.runs)
    pairs = ((one.runs[at], run) for at, run in zip(numbers, other.runs, strict=True) if at is not None)
    return any(ours.shapes != theirs.shapes for ours, theirs in pairs)


_Kind = tuple[str, int, CapturedCall | None]
_MOST_PLANS = 64
"""The number of plans that are kept, one for each signature and situation of a call."""


class PlansOfPaths:
    """The plans of calls in several regions, by the control-flow path and the situation.

    The runs of regions in a forward are counted, and each has a schedule of its own, also where Dynamo compiles one
    region for several of them (a block that is called in a loop). A forward may leave out runs that are planned. One
    that has others, or larger ones, is captured by `capture`, and planned together with those before it, so that after
    a few steps one plan serves every path through the model's code. Sizes that differ between runs are symbols of one
    region.
    """

    def __init__(
        self, model: nn.Module, road: Road, keeping: Keeping, capture: Callable[[Call, str], CapturedCall]
    ) -> None:
        self.model, self.road, self.keeping, self.capture = model, road, keeping, capture
        self.paths: LruCache[_Kind, ControlPaths] = LruCache(_MOST_PLANS)
        """The paths that calls of a kind were seen to take."""
        self._plans: LruCache[tuple[CapturedCall, Situation], Executable] = LruCache(_MOST_PLANS)
        self._plans_freed = 0
        """The number of plans that were made when solvers were last freed."""

    def planned(self, captured: CapturedCall, call: Call, situation: Situation, plan: Plan) -> None:
        """Have further calls of the kind of this one run by a plan in that situation."""
        paths = self.paths.get(self._kind(call))
        if paths is None:
            self.paths[self._kind(call)] = ControlPaths.of(captured, call)
        else:
            paths.calls.insert(0, captured)
        self._plans[captured, situation] = self._with_runs(captured, plan)

    def use_road(self, road: Road) -> None:
        """Have calls planned again, by another road."""
        self.road, self._plans_freed = road, 0
        self._plans.clear()

    def forget(self, but: Plan | None = None) -> None:
        """Drop all plans but `but`; None drops all."""
        kept = [(key, planned) for key, planned in self._plans.items() if planned.plan is but]
        self._plans.clear()
        for key, planned in kept:
            self._plans[key] = planned

    def of(self, call: Call, first: Callable[[], CapturedCall]) -> ControlPaths:
        """The paths known for calls of the kind of this one, among them one for sizes as large as its own; `first`
        captures the call where it is the first of its kind."""
        paths = self.paths.get(self._kind(call))
        if paths is None:
            paths = self.paths[self._kind(call)] = ControlPaths.of(first(), call, new=True)
        elif not paths.sizes.cover(call):
            paths.add(self.capture(call, paths.calls[0].break_reason), call)
        return paths

    def _kind(self, call: Call) -> _Kind:
        """Equal for calls that may share a plan: all but their sizes, the state of autocast, what is exchanged between
        ranks, and what is kept gathered. Calls that keep blocks are captured again where those that free them were:
        Dynamo's graphs may be others since then."""
        text = f"{call_kind(call)} {autocast_state()} {exchange_in_words(self.model)}"
        return text, len(self.keeping.kept), self.keeping.freed if self.keeping.kept else None

    def fitting(self, in_progress: CallInProgress, paths: ControlPaths, freed: Plan | None = None) -> Executable:
        """The plan for a call that fits beside what else is on the device. `freed` is the one that frees all blocks,
        where this one may keep some. Raises `BudgetError`, `CaptureError`."""
        try:
            make = partial(self._plan_for, in_progress.call, paths, freed)
            return in_progress.fitting(make, lambda situation: (paths.calls[0], situation) in self._plans)
        except BudgetError:  # those that follow must not be planned to be as large as this one
            self.paths.pop(self._kind(in_progress.call), None)
            raise
        finally:
            if self.road.plans != self._plans_freed:  # their solvers' tables would stay for the whole training
                self._plans_freed = self.road.plans
                self.road.planner.forget_solvers()

    def _plan_for(self, call: Call, paths: ControlPaths, freed: Plan | None, situation: Situation) -> Executable:
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

    def _extended(
        self, before: CapturedCall | None, captured: CapturedCall, call: Call, situation: Situation
    ) -> Plan | None:
        """The plan of a call by the schedules of the runs that were planned before; None where a search is needed."""
        planned = None if before is None else self._plans.get((before, situation))
        if planned is None:
            return None
        runs = self._scheduled(captured, planned.rewriting)
        return self.road.extend(planned.plan, captured, call, situation, known_places(planned.runs, runs))

    def _with_runs(self, captured: CapturedCall, plan: Plan) -> Executable:
        """The plan of a captured call with the runs that it schedules: not those of views alone."""
        step = plan.captured
        assert step is not None
        return Executable(captured, plan, self._scheduled(captured, step.rewriting_of_regions))

    def _scheduled(self, captured: CapturedCall, rewriting: Rewriting) -> tuple[RegionRun, ...]:
        return tuple(run for run in captured.runs if self.trace(run.region, rewriting).differentiated)

    def trace(self, region: RecordedRegion, rewriting: Rewriting) -> JointGraph:
        """The joint graph of a region under a rewriting."""
        return self.road.planner.traces.of(region, rewriting)

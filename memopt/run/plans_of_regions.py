"""The plans of calls in one region: each for a situation, and for sizes up to a ceiling."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Hashable, Sequence
from functools import partial
from typing import Any

from memopt.account.elsewhere import in_steps
from memopt.capture.captured_call import CapturedCall
from memopt.capture.dynamo import CallStopped
from memopt.capture.inputs import Call, Place, all_places, markable
from memopt.capture.region import RecordedRegion, Sizes
from memopt.errors import BudgetError, CaptureError, without_frames
from memopt.lru import LruCache
from memopt.planning.plan import Plan
from memopt.planning.terms import Situation
from memopt.run.call_in_progress import CallInProgress
from memopt.run.changed_inputs import mark_changed
from memopt.run.executable import Executable
from memopt.run.road import Road
from memopt.run.sizes import PlansBySize, SizeBounds, captured_for, insisted, places_of

_MOST = 512
"""The number of pairs of region and situation whose code is kept: more sets of shapes than Dynamo keeps."""


class RegionRecorded(CallStopped):
    """Ends a call that was run only to be captured; has the captured region and its inputs."""

    def __init__(self, region: RecordedRegion, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.region, self.inputs = region, inputs


class Insists(CallStopped):
    """Ends a call whose sizes the captured graphs are not valid for; has, for each such size, the line of the model
    that requires another value."""

    def __init__(self, lines: dict[Place, str]) -> None:
        super().__init__()
        self.lines = lines


class PlansOfRegions:
    """The plans of calls in one region, by region, situation and the largest sizes they are for. Sizes that differ
    between calls are symbols of one graph; a new situation needs no new capture."""

    def __init__(self, road: Road, bounds: SizeBounds) -> None:
        self.road, self.bounds = road, bounds
        self.insists: dict[Place, str] = {}
        """The changing sizes that Dynamo made constants, each with the line of the model that needs it."""
        self._marked: set[Place] = set()
        self._plans: LruCache[tuple[RecordedRegion, Situation, Sizes], Plan] = LruCache(_MOST)
        """The plans that were made before the first run of their call."""
        self._emitted: LruCache[tuple[RecordedRegion, Situation], PlansBySize] = LruCache(_MOST)
        self._captured: LruCache[tuple[RecordedRegion, Sizes], CapturedCall] = LruCache(_MOST)
        self._refused: LruCache[Hashable, BudgetError] = LruCache(_MOST)
        """The refusals of situations that are only some of several to be tried, by region, situation, sizes and bytes
        elsewhere: so that a group of forwards without room is not planned again in each step."""

    @property
    def runs(self) -> bool:
        """Whether any call has run by a plan so far."""
        return bool(self._emitted)

    def changing(self, call: Call) -> Collection[Place]:
        """The dimensions of a call's tensors that become symbols in its capture."""
        if found := self.bounds.changing(call):
            found = markable(call, found)
            self._marked |= found
        return found

    def ahead(self, region: RecordedRegion, inputs: Sequence[Any], call: Call) -> CapturedCall:
        """The captured call of a region that `call` would run on `inputs`, captured before its first run; it has the
        sizes up to which it is to be planned."""
        return self._captured_call(region, self.bounds.ahead(region, inputs, call), inputs, call)

    def planned(self, captured: CapturedCall, situation: Situation, plan: Plan) -> None:
        """Make the first run of a captured call in this situation use `plan`, which was made before that run."""
        self._plans[captured.regions[0], situation, tuple(captured.sizes.allowed.values())] = plan

    def forget(self, *, captured: bool = False) -> None:
        """Drop all plans and emitted code, so that calls are planned again; captured calls stay unless `captured`."""
        self._plans.clear()
        self._emitted.clear()
        self._refused.clear()
        if captured:
            self._captured.clear()

    def fitting(self, region: RecordedRegion, inputs: tuple[Any, ...], in_progress: CallInProgress) -> Executable:
        """The plan that a call of this region runs by, with its code; its step fits the budget together with all else
        on the device. Raises `BudgetError` where no plan fits, `CaptureError` where the region cannot be traced, and
        `Insists` where its graph is not valid for the call's sizes."""
        sizes = region.sizes_of(inputs)
        _check_sizes(region, sizes, inputs, in_progress.call)
        if region.changed is None:
            mark_changed(region, inputs, in_progress.call, in_progress.moment.entry)
        make = partial(self._emitted_in, region, sizes, inputs, in_progress)
        return in_progress.fitting(make, partial(self._known, region, sizes))

    def _known(self, region: RecordedRegion, sizes: Sizes) -> dict[Situation, Executable]:
        """The plans of a region that cover these sizes, by situation: of several the one with the least added time."""
        plans = {situation: plans.best(sizes) for (of, situation), plans in self._emitted.items() if of is region}
        return {situation: best for situation, best in plans.items() if best is not None}

    def _emitted_in(
        self,
        region: RecordedRegion,
        sizes: Sizes,
        inputs: tuple[Any, ...],
        in_progress: CallInProgress,
        situation: Situation,
        advise: bool,
    ) -> Executable:
        key, call = (region, situation), in_progress.call
        if key not in self._emitted:
            self.insists |= insisted(region, inputs, call, self._marked)
            self._emitted[key] = PlansBySize()
        plans = self._emitted[key]
        again = bool(situation.to_come or situation.elsewhere)
        elsewhere = self.road.planner.accounts.beside.found.other if situation.to_come else 0
        rounded = in_steps(elsewhere, self.road.planner.terms.options.budget_bytes) if again else 0
        tried = region, situation, sizes, rounded
        if again and not advise and (refused := self._refused.get(tried)) is not None:
            raise refused.adding()
        ceiling = plans.covering(sizes)
        if ceiling is not None and (ready := plans.get(ceiling)) is not None:
            return ready
        above, ceilings = self.bounds.above(region, inputs, call), [sizes]
        if ceiling is not None:
            ceilings = [ceiling, sizes]
        elif (region, situation, sizes) not in self._plans:
            largest = self.bounds.above(region, inputs, call, margin=1.0)
            # Refused sizes come last: they are planned only to name a budget.
            ceilings = sorted((above, largest, sizes), key=plans.exceeds_budget)
        started = time.perf_counter()
        refusals: dict[Sizes, BudgetError] = {}
        for most in dict.fromkeys(ceilings):
            captured = self._captured_call(region, most, inputs, call)
            try:
                if most != sizes and (known := plans.refusal(most)) is not None:
                    raise known
                planned = self._plans.get((region, situation, most))
                emitted = self.road.emit_call(captured, call, situation, planned, advise=advise and most == sizes)
                break
            except BudgetError as refused:
                refusals[most] = without_frames(refused)
                if most != sizes:
                    plans.refuse(most, refused)
            except CaptureError:
                if most == sizes:
                    raise
                # Tracing may have made one of the sizes a constant, so that shapes at larger sizes disagree.
                _check_sizes(region, most, inputs, call)
        else:
            named = refusals[sizes]
            if (larger := plans.refusal(above)) is not None:
                named = in_progress.moment.for_sizes_above(named, larger)
            if again:
                self._refused[tried] = named.adding()
            raise named
        plans.add(most, emitted, time.perf_counter() - started)
        if in_progress.moment.kept_outputs > in_progress.moment.entry.notable_bytes:
            gc.collect()  # reference cycles left by the recording may keep them alive
        _check_sizes(region, sizes, inputs, call)  # tracing may have found more conditions
        return emitted

    def _captured_call(self, region: RecordedRegion, ceiling: Sizes, inputs: Sequence[Any], call: Call) -> CapturedCall:
        key = region, ceiling
        if key not in self._captured:
            self._captured[key] = captured_for(region, ceiling, inputs, call)
        return self._captured[key]


def _check_sizes(region: RecordedRegion, sizes: Sizes, inputs: tuple[Any, ...], call: Call) -> None:
    """Raise `Insists` where the graphs of a region, which the call runs on these inputs, are not valid for `sizes`."""
    if sizes and not region.assumed_sizes.hold(sizes):
        lines = region.assumed_sizes.broken(sizes)
        found = {place: line for symbol, line in lines.items() for place in places_of(region, symbol, inputs, call)}
        raise Insists(found or dict.fromkeys(all_places(call), "a line within torch"))

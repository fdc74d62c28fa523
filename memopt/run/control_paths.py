"""The control-flow paths that forwards have taken through a model, and which planned run each run of a region is."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.capture.data_sizes import in_shapes
from memopt.capture.inputs import Call
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun
from memopt.capture.together import MARGIN, known_places, together, with_eager_bytes
from memopt.compat.symbols import known_sizes
from memopt.device.storages import find_storages
from memopt.errors import CaptureError
from memopt.planning.captured import Captured
from memopt.planning.plan import Plan
from memopt.planning.region_schedule import RegionSchedule
from memopt.run.sizes import LargestSizes
from passes import is_pure

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
    _margin: float = MARGIN
    _joins: dict[CapturedCall, tuple[CapturedCall, CapturedCall]] = field(default_factory=dict)
    """What a path was made of: the path before, and a capture that was put to it."""

    @classmethod
    def of(cls, captured: CapturedCall, call: Call) -> ControlPaths:
        """The first path that was seen."""
        return cls([captured], LargestSizes.of(call))

    def use(self, path: CapturedCall) -> None:
        """Make a path the first."""
        self.calls = [path, *(other for other in self.calls if other is not path)]

    def add(self, captured: CapturedCall, call: Call) -> None:
        """Put the capture of a call to the path that was taken last; where that drops some of its runs, beside it."""
        self.sizes = self.sizes.covering(call)
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

    def smaller(self) -> Iterator[CapturedCall]:
        """The first path; then, each where the one before it does not fit the budget: with its sizes as they were seen
        and no margin above them, and the latest capture by itself."""
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


Trace = Callable[[RecordedRegion, Rewriting], JointGraph]


@dataclass(frozen=True)
class Found:
    """The planned run that a run of the present forward is."""

    number: int
    joint: JointGraph
    """The graph that it runs by."""
    schedule: RegionSchedule


@dataclass(frozen=True, eq=False)
class PlannedRuns:
    """A plan, the captured call that it is for, and the runs that it schedules."""

    captured: CapturedCall
    plan: Plan
    runs: tuple[RegionRun, ...]
    """The runs that have a schedule, in the order of the plan's regions."""
    _planned_values: dict[int, tuple[Value, ...]] = field(default_factory=dict, repr=False)
    """What the planned runs make at the largest sizes, by their number."""
    _names: dict[tuple[RecordedRegion, tuple[int, ...], int], Mapping[str, str] | None] = field(
        default_factory=dict, repr=False
    )
    """Planned node → node of a run of that region with these sizes, for runs in the place of the planned run of that
    number; None for a run that may not take its place."""

    @property
    def step(self) -> Captured:
        """The graphs of the plan."""
        step = self.plan.captured
        assert step is not None
        return step

    def limits(self, number: int) -> dict[str, int]:
        """The limits of the sizes that depend on data within planned run `number`, by their symbol in its graph."""
        changing = self.runs[number].data_sizes.allowed
        within = {name: most for name, most in self.step.sizes_of(number).items() if name not in changing}
        return in_shapes(self.step.regions[number].module.graph, within)

    @property
    def rewriting(self) -> Rewriting:
        """The passes and the precision of its regions."""
        return self.step.rewriting_of_regions

    def find(self, run: RegionRun, first: int, trace: Trace) -> Found | None:
        """The planned run, `first` or later, that a run of the present forward is; None where there is none, or it has
        larger sizes than the plan is for.

        `trace` traces a region that was recorded on fakes, or once more under other guards or for other sizes.
        """
        for number in range(first, len(self.runs)):
            planned, joint = self.runs[number], self.step.regions[number]
            if planned.place != run.place:
                continue
            schedule = self.plan.regions[number]
            if planned.region is run.region:
                return Found(number, joint, schedule) if run.is_within(planned) else None
            own = trace(run.region, self.rewriting)
            own = own.accumulating(_as_planned(run, planned, joint))
            if own.fingerprint == joint.fingerprint and not run.region.changing:
                return Found(number, own, schedule)
            names = self._names_in(own, run, number)
            if names is not None:
                evaluations = tuple(names[name] for name in schedule.evaluations)
                return Found(number, own, replace(schedule, fingerprint=own.fingerprint, evaluations=evaluations))
        return None

    def _names_in(self, joint: JointGraph, run: RegionRun, number: int) -> Mapping[str, str] | None:
        """Planned node → node of a run with the same operators on values that are not larger; None for other runs."""
        key = run.region, run.sizes, number
        if key not in self._names:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            try:
                with known_sizes(run.data_sizes.seen):
                    ours = values_of(joint)
            except CaptureError:  # sizes that depend on data and have no limit are observed in captures alone
                self._names[key] = None
                return None
            planned = self._values(number)
            names = names_in(ours, planned)
            schedule = self.plan.regions[number]
            known = names is not None and names.keys() >= set(schedule.evaluations) and not schedule.offloads
            self._names[key] = names if known else None
        return self._names[key]

    def _values(self, number: int) -> tuple[Value, ...]:
        if number not in self._planned_values:
            with self.step.with_sizes(number):
                self._planned_values[number] = values_of(self.step.regions[number])
        return self._planned_values[number]


def _as_planned(run: RegionRun, planned: RegionRun, joint: JointGraph) -> frozenset[int]:
    """The numbers, among the inputs of a run, of the parameters whose gradients the planned run adds to `.grad`."""
    numbers = {
        joint.place_of(number): joint.place_of(own)
        for number, own in zip(planned.parameter_ids, run.parameter_ids, strict=True)
    }
    return frozenset(numbers[number] for number in joint.parameter_inputs if number in numbers)


_MOST_NAMES = 4096
"""The number of answers that are remembered."""


@dataclass(frozen=True)
class Value:
    """A node that allocates memory or has effects."""

    name: str
    computation: int
    """A hash of the operators that compute it from the inputs of the graph, without sizes and other numbers."""
    nbytes: int
    """The bytes that it allocates."""


def values_of(joint: JointGraph) -> tuple[Value, ...]:
    """The values of a graph in its order, with the sizes that `upper_bound` takes for its symbols. Raises
    `CaptureError` where a size is not known."""
    graph = joint.module.graph
    made = {info.maker: info.bytes for info in find_storages(graph).infos}
    of_node: dict[fx.Node, int] = {}
    found = []
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            of_node[node] = hash(("input", len(of_node)))
        operands = tuple(of_node[operand] for operand in node.all_input_nodes if operand in of_node)
        if node.op == "call_function" and (node in made or not is_pure(node)):
            of_node[node] = hash((str(node.target), operands))
            found.append(Value(node.name, of_node[node], made.get(node, 0)))
        elif node.op == "call_function" and operands:
            of_node[node] = _of_view(node, operands)
    return tuple(found)


def _of_view(node: fx.Node, operands: Sequence[int]) -> int:
    """The computation of a node that allocates nothing: a view, which counts as what it is a view of, or one of several
    results."""
    part: Any = node.args[1] if node.target is operator.getitem else None
    return operands[0] if part is None else hash((operands[0], part))


def names_in(ours: Sequence[Value], planned: Sequence[Value]) -> dict[str, str] | None:
    """Name in `planned` → name in `ours`; None unless they have the same values, none of them larger in `ours`. Of
    several with the same computation, the first is the first."""
    left: defaultdict[int, list[Value]] = defaultdict(list)
    for value in reversed(ours):
        left[value.computation].append(value)
    names = {}
    for value in planned:
        own = left[value.computation].pop() if left[value.computation] else None
        if own is None or own.nbytes > value.nbytes:
            return None
        names[value.name] = own.name
    return names if len(names) == len(ours) else None

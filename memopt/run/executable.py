"""Plans that can be run, and the search within a plan for the schedule by which a region runs in this forward."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.capture.captured_call import CapturedCall, RegionRun
from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.region import RecordedRegion
from memopt.compat.symbols import known_sizes, shape_symbols
from memopt.device.storages import find_storages
from memopt.emit.emit import Emitted
from memopt.errors import CaptureError
from memopt.planning.plan import Plan
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import RegionSchedule
from passes import is_pure

Trace = Callable[[RecordedRegion, Rewriting], JointGraph]


@dataclass(frozen=True)
class _FoundRun:
    """The planned run whose schedule serves a run of a region in the present forward; `number` is its place in the
    plan."""

    number: int
    joint: JointGraph
    """The joint graph of the run, whose names `schedule` uses."""
    schedule: RegionSchedule


@dataclass(frozen=True, eq=False)
class Executable:
    """A plan ready to run, with the captured call that it is for, and the runs of regions that it has schedules for."""

    captured: CapturedCall
    plan: Plan
    runs: tuple[RegionRun, ...]
    """The runs that have a schedule, in the order of the plan's regions."""
    region: Emitted | None = None
    """The emitted code of a call in one region; None for a call in several, whose code is emitted as they run."""
    _planned_values: dict[int, tuple[_Value, ...]] = field(default_factory=dict, repr=False)
    """The values of the planned runs at the largest sizes, by the number of the run."""
    _names: dict[tuple[RecordedRegion, tuple[int, ...], int], Mapping[str, str] | None] = field(
        default_factory=dict, repr=False
    )
    """By region, sizes and number of a planned run: the name of a planned node → the name of that node in a run of the
    region with these sizes. None where such a run may not take the place of the planned one."""

    @property
    def step(self) -> TracedStep:
        """The traced graphs that the plan is for."""
        step = self.plan.captured
        assert step is not None
        return step

    def limits(self, number: int) -> dict[str, int]:
        """The largest values of data-dependent sizes in planned run `number`, by their symbol in its graph."""
        changing = self.runs[number].data_sizes.allowed
        within = {name: most for name, most in self.step.sizes_of(number).items() if name not in changing}
        nodes = self.step.regions[number].module.graph.nodes
        names = set().union(*(shape_symbols(node.meta.get("val")) for node in nodes))
        return {name: size for name, size in within.items() if name in names}

    @property
    def rewriting(self) -> Rewriting:
        """The passes and the precision that the plan's graphs were rewritten with."""
        return self.step.rewriting_of_regions

    def find(self, run: RegionRun, first: int, trace: Trace) -> _FoundRun | None:
        """The first planned run, from number `first` on, whose schedule serves `run`, a run of a region in the current
        forward: both have the same joint graph and the same place in the model's code (`RegionRun.place`). None where
        there is none, or where `run` has larger sizes than were planned for.

        `trace` returns the joint graph of a region under a `Rewriting`. It is called where the region of `run` is not
        the planned one: where the plan was made on fake tensors, or the same code was captured again under other guards
        or for other sizes."""
        for number in range(first, len(self.runs)):
            planned, joint = self.runs[number], self.step.regions[number]
            if planned.place != run.place:
                continue
            schedule = self.plan.regions[number]
            if planned.region is run.region:
                return _FoundRun(number, joint, schedule) if run.is_within(planned) else None
            own = trace(run.region, self.rewriting)
            own = own.accumulating(_as_planned(run, planned, joint))
            if own.fingerprint == joint.fingerprint and not run.region.changing:
                return _FoundRun(number, own, schedule)
            names = self._names_in(own, run, number)
            if names is not None:
                evaluations = tuple(names[name] for name in schedule.evaluations)
                return _FoundRun(number, own, replace(schedule, fingerprint=own.fingerprint, evaluations=evaluations))
        return None

    def _names_in(self, joint: JointGraph, run: RegionRun, number: int) -> Mapping[str, str] | None:
        """The name of a planned node → its name in `joint`, the graph of `run`; None unless `joint` has the same
        operators as planned run `number`, on values that are not larger, and the schedule of that planned run offloads
        nothing."""
        key = run.region, run.sizes, number
        if key not in self._names:
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            try:
                with known_sizes(run.data_sizes.seen):
                    ours = values_of(joint)
            except CaptureError:  # data-dependent sizes without a limit are known in captures only
                self._names[key] = None
                return None
            planned = self._values(number)
            names = names_in(ours, planned)
            schedule = self.plan.regions[number]
            known = names is not None and names.keys() >= set(schedule.evaluations) and not schedule.offloads
            self._names[key] = names if known else None
        return self._names[key]

    def _values(self, number: int) -> tuple[_Value, ...]:
        if number not in self._planned_values:
            with self.step.with_sizes(number):
                self._planned_values[number] = values_of(self.step.regions[number])
        return self._planned_values[number]


def _as_planned(run: RegionRun, planned: RegionRun, joint: JointGraph) -> frozenset[int]:
    """The `JointGraph.parameter_inputs` of a run in the place of a planned one: the parameters in the places of those
    whose gradients the planned run adds to `.grad` itself. `joint` is the planned run's graph."""
    numbers = {
        joint.place_of(number): joint.place_of(own)
        for number, own in zip(planned.parameter_ids, run.parameter_ids, strict=True)
    }
    return frozenset(numbers[number] for number in joint.parameter_inputs if number in numbers)


_MOST_NAMES = 4096
"""The largest number of entries in `Executable._names`."""


@dataclass(frozen=True)
class _Value:
    """A node that allocates memory or has effects."""

    name: str
    computation: int
    """A hash of the operators that compute it from the inputs of the graph, without sizes and other numbers."""
    nbytes: int
    """The bytes that it allocates."""


def values_of(joint: JointGraph) -> tuple[_Value, ...]:
    """The nodes of a graph that allocate memory or have side effects, in order, with their sizes: for symbolic sizes
    the upper bounds. Raises `CaptureError` where a size is not known."""
    graph = joint.module.graph
    storages = find_storages(graph)
    made = {block.maker: nbytes for block, nbytes in zip(storages.blocks, storages.bytes, strict=True)}
    of_node: dict[fx.Node, int] = {}
    found = []
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            of_node[node] = hash(("input", len(of_node)))
        operands = tuple(of_node[operand] for operand in node.all_input_nodes if operand in of_node)
        if node.op == "call_function" and (node in made or not is_pure(node)):
            of_node[node] = hash((str(node.target), operands))
            found.append(_Value(node.name, of_node[node], made.get(node, 0)))
        elif node.op == "call_function" and operands:
            # A view has the hash of what it is a view of; one of several results (`getitem`) has a hash of its own.
            part: Any = node.args[1] if node.target is operator.getitem else None
            of_node[node] = operands[0] if part is None else hash((operands[0], part))
    return tuple(found)


def names_in(ours: Sequence[_Value], planned: Sequence[_Value]) -> dict[str, str] | None:
    """For each value of `planned`, by name, the name of the equal value in `ours`; None unless both have the same
    values and none is larger in `ours`. Several values with the same computation are paired in order."""
    left: defaultdict[int, list[_Value]] = defaultdict(list)
    for value in reversed(ours):
        left[value.computation].append(value)
    names = {}
    for value in planned:
        own = left[value.computation].pop() if left[value.computation] else None
        if own is None or own.nbytes > value.nbytes:
            return None
        names[value.name] = own.name
    return names if len(names) == len(ours) else None

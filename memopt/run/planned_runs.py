"""The runs of regions that a plan schedules, and which of them a run of the present forward is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memopt.capture.joint import JointGraph
from memopt.capture.operators import Rewriting
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun
from memopt.compat.symbols import known_sizes
from memopt.device.storages import find_storages
from memopt.planning.captured import Captured
from memopt.planning.plan import Plan
from memopt.planning.region_schedule import RegionSchedule
from passes import is_pure

Trace = Callable[[RecordedRegion, Rewriting], JointGraph]
Values = Mapping[str, tuple[str, int]]
"""Name of a node that allocates memory or has effects → its operator, and the bytes that it allocates."""


@dataclass(frozen=True, eq=False)
class PlannedRuns:
    """A plan, the captured call that it is for, and the runs that it schedules."""

    captured: CapturedCall
    plan: Plan
    runs: tuple[RegionRun, ...]
    """The runs that have a schedule, in the order of the plan's regions."""
    _planned_values: dict[int, Values] = field(default_factory=dict, repr=False)
    """What the planned runs make at the largest sizes, by their number."""
    _taken: dict[tuple[RecordedRegion, tuple[int, ...], int], bool] = field(default_factory=dict, repr=False)
    """Whether a run of a region with these sizes may take the place of the planned run of that number."""

    @property
    def step(self) -> Captured:
        """The graphs of the plan."""
        step = self.plan.captured
        assert step is not None
        return step

    @property
    def rewriting(self) -> Rewriting:
        """The passes and the precision of its regions."""
        return self.step.rewriting_of_regions

    def find(self, run: RegionRun, first: int, trace: Trace) -> tuple[int, JointGraph] | None:
        """The number of the planned run, `first` or later, that a run of the present forward is, and the joint graph
        that it runs by; None where there is none, or it has larger sizes than the plan is for.

        `trace` traces a region that was recorded on fakes, or once more under other guards.
        """
        for number in range(first, len(self.runs)):
            planned, joint = self.runs[number], self.step.regions[number]
            if planned.place != run.place:
                continue
            if planned.region is run.region:
                within = all(size <= most for size, most in zip(run.sizes, planned.most, strict=True))
                return (number, joint) if within else None
            own = trace(run.region, self.rewriting)
            if own.fingerprint == joint.fingerprint or self._may_take(own, run, number):
                return number, own.accumulating(_as_planned(run, planned, joint))
        return None

    def schedule(self, number: int) -> RegionSchedule:
        """The schedule of a planned run."""
        return self.plan.regions[number]

    def _may_take(self, joint: JointGraph, run: RegionRun, number: int) -> bool:
        """Whether a run has the operators of the planned run `number`, by the same names, on values that are not
        larger."""
        key = run.region, run.sizes, number
        if key not in self._taken:
            if len(self._taken) >= _MOST:
                self._taken.clear()
            planned = self._values(number)
            ours = _values(joint, run.data_sizes.seen)
            names = {node.name for node in joint.module.graph.nodes}
            self._taken[key] = (
                ours.keys() == planned.keys()
                and all(op == planned[name][0] and made <= planned[name][1] for name, (op, made) in ours.items())
                and names.issuperset(self.schedule(number).evaluations)
            )
        return self._taken[key]

    def _values(self, number: int) -> Values:
        if number not in self._planned_values:
            self._planned_values[number] = _values(self.step.regions[number], self.step.sizes_of(number))
        return self._planned_values[number]


def _values(joint: JointGraph, sizes: Mapping[str, int]) -> Values:
    with known_sizes(sizes):
        made = {info.maker: info.bytes for info in find_storages(joint.module.graph).infos}
    calls = (node for node in joint.module.graph.nodes if node.op == "call_function")
    return {
        node.name: (str(node.target), made.get(node, 0)) for node in calls if node in made or not is_pure(node)
    }


def _as_planned(run: RegionRun, planned: RegionRun, joint: JointGraph) -> frozenset[int]:
    """The numbers, among the inputs of a run, of the parameters whose gradients the planned run adds to `.grad`."""
    numbers = dict(zip(planned.parameter_ids, run.parameter_ids, strict=True))
    return frozenset(numbers[number] for number in joint.parameter_inputs if number in numbers)


_MOST = 4096
"""The number of answers that are remembered."""

"""A training call as Dynamo captured it: the runs of its regions, in the order of the forward, with their sizes, and
what they exchange with eager code; and how two captures of a call are planned as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx

from memopt.capture.data_sizes import (
    MARGIN,
    DataSizes,
    Observed,
    limits_by_operators,
    match,
    most_observed,
    without_limit,
)
from memopt.capture.outputs import example_of
from memopt.capture.region import RecordedRegion, Sizes, parameter_ids
from memopt.compat.tensors import is_sharded
from memopt.device.storages import storage_bytes
from memopt.units import size
from passes.graphs.node_facts import graph_results


@dataclass(frozen=True)
class EagerCodeBytes:
    """The bytes that eager code before, during and after one run of a region holds."""

    before: int = 0
    """The most held between the previous run of a region, or the beginning of the forward, and this one."""
    during: int = 0
    """Held while the region's forward runs."""
    before_backward: int = 0
    """The most held between the previous forward or backward of any region and this run's backward."""
    during_backward: int = 0
    """Held while its backward runs."""

    def __or__(self, other: EagerCodeBytes) -> EagerCodeBytes:
        """The larger number of bytes of each kind."""
        return EagerCodeBytes(*map(max, astuple(self), astuple(other)))

    def scaled(self, factor: float) -> EagerCodeBytes:
        """A copy with each of its byte counts multiplied by `factor` and rounded up."""
        return EagerCodeBytes(*(math.ceil(factor * nbytes) for nbytes in astuple(self)))


@dataclass(frozen=True)
class Passed:
    """The tensors of a region's run that come from or go to other code (eager code, other regions): outputs and
    gradients of inputs, if they are freed before the step ends, and inputs that are outputs of an earlier region."""

    outputs: frozenset[int] = frozenset()
    """Positions of outputs that nobody holds any more once the region's backward begins."""
    gradients: frozenset[int] = frozenset()
    """Numbers of the inputs whose gradients other code takes: inputs that other code computed, and parameters that
    FSDP2 has gathered."""
    forward_only: Mapping[int, int] = field(default_factory=dict)
    """Position of an output, one of `outputs`, that nobody holds once the call's forward is over, unless the backward
    of a region reads it → the number of the last run of a region that began while it was held."""
    given: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Number of an input that lies in the memory of an earlier run's output → that run and the output's position."""

    def __and__(self, other: Passed) -> Passed:
        """The part common to both captures. References to other runs by number are dropped, as the numbers may
        differ: outputs then count as held until the region's backward begins."""
        return Passed(self.outputs & other.outputs, self.gradients & other.gradients)

    def without_runs(self) -> Passed:
        """A copy without the fields that refer to other runs by number."""
        return Passed(self.outputs, self.gradients)


@dataclass(frozen=True)
class RegionRun:
    """One run of a region in a training call, with its sizes and what it exchanges with eager code."""

    region: RecordedRegion
    parameter_ids: Mapping[int, int]
    """Number of an input that is a trainable parameter → `id` of the parameter passed to this run."""
    shapes: tuple[Sizes, ...] = ()
    """The shapes of the tensors among its inputs; -1 for a size that is not known."""
    sizes: Sizes = ()
    """The changing sizes of the run (`RecordedRegion.changing`)."""
    most: Sizes = ()
    """The largest changing sizes that the run is planned for."""
    eager: EagerCodeBytes = field(default_factory=EagerCodeBytes)
    """The bytes that eager code holds around the run."""
    passed: Passed = field(default_factory=Passed)
    """The outputs, gradients and inputs that the run shares with other code."""
    observed: tuple[Observed, ...] = ()
    """The results of its operators whose sizes depend on data, where it ran on values."""

    @classmethod
    def of(cls, region: RecordedRegion, inputs: Sequence[Any], real_ids: Mapping[int, int] | None = None) -> RegionRun:
        """The run of a region on these inputs; `real_ids` is as for `RecordedRegion.record`."""
        shapes = tuple(
            tuple(size if isinstance(size, int) else -1 for size in value.shape)
            for value in inputs
            if isinstance(value, torch.Tensor)
        )
        sizes = region.sizes_of(inputs)
        return cls(region, parameter_ids(inputs, real_ids), shapes, sizes, sizes)

    def is_within(self, planned: RegionRun) -> bool:
        """Whether a plan for `planned`, a run of the same region, serves this one."""
        counted = zip(self.sizes, planned.most, self.region.counted, strict=True)
        return all(size <= most for size, most, counts in counted if counts)

    @property
    def place(self) -> tuple[object, ...]:
        """A key, equal for runs that a plan may treat as the same: the same operators on the same parameters."""
        return self.region.operators, tuple(self.parameter_ids.values())

    @property
    def data_sizes(self) -> DataSizes:
        """The changing sizes of the run by their symbols, and the largest that it is planned for."""
        symbols = list(self.region.changing.values())
        return DataSizes(dict(zip(symbols, self.sizes, strict=True)), dict(zip(symbols, self.most, strict=True)))

    def sizes_in(self, graph: fx.Graph) -> DataSizes:
        """`data_sizes`, extended by the data-dependent sizes in the region's joint graph `graph` that have no known
        limit: their observed values with a margin, or the limits that follow from the operators that make them."""
        unlimited = without_limit(graph)
        seen = (match(graph, self.observed) if unlimited and self.observed else None) or {}
        observed = {name: size for name, size in seen.items() if name in unlimited}
        limits = limits_by_operators(graph, unlimited - observed.keys(), self.data_sizes.allowed)
        return self.data_sizes | DataSizes(limits, limits) | DataSizes.of(observed)


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """A training call as Dynamo captured it: the runs of its regions, in the order of the forward."""

    runs: tuple[RegionRun, ...]
    break_reason: str = ""
    """Why the forward breaks into several regions; empty for a call that is one region."""
    ending: EagerCodeBytes = field(default_factory=EagerCodeBytes)
    """The bytes that eager code holds at the end of the forward (`during`), at most between the last region's forward
    and that end (`before_backward`), and at most after the last backward of a region (`before`)."""
    returned_bytes: int = 0
    """The bytes that a call in several regions returns, which the last region need not have made; 0 for one region."""
    sizes: DataSizes = field(default_factory=DataSizes)
    """The changing sizes of a call that is one region: those of the call, and the largest that it is planned for."""
    input_bytes: tuple[int, ...] = ()
    """The bytes of each of the call's tensors at the largest sizes; empty where all sizes are fixed."""
    eager: frozenset[int] = frozenset()
    """The `id`s of the parameters that get gradients from eager code between the regions."""
    kept: tuple[tuple[str, int], ...] = ()
    """Under FSDP2, the path and the bytes of each block whose parameters stay gathered until its backward."""

    @property
    def whole(self) -> bool:
        """Whether the call is one region, without graph breaks."""
        return not self.break_reason

    @property
    def split(self) -> bool:
        """Whether a region of the call reads parameters that are split over ranks."""
        return any(is_sharded(run.region.inputs[number]) for run in self.runs for number in run.region.wrapped)

    @property
    def output_bytes(self) -> int:
        """The bytes of the tensors that the call returns."""
        if self.returned_bytes:
            return self.returned_bytes
        values = map(example_of, graph_results(self.runs[-1].region.graph_module.graph))
        return sum(storage_bytes(value) for value in values if value is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the capture for the plan."""
        if self.whole:
            deferred = self.runs[0].region.deferred
            later = "of outputs other than the loss are computed when they are first read, and not held before"
            return () if deferred is None else (f"{size(deferred.bytes)} {later}",)
        captured = f"captured in {len(self.runs)} regions"
        changing = sum(run.most != run.sizes or run.most != () for run in self.runs)
        if changing:
            captured += f", {changing} of them for sizes that change"
        return (f"{captured}, since {self.break_reason}; eager code between them is not planned",)

    @classmethod
    def of(
        cls, region: RecordedRegion, sizes: DataSizes | None = None, input_bytes: tuple[int, ...] = ()
    ) -> CapturedCall:
        """The captured call of a single region. `sizes` are its changing sizes, if any; `input_bytes` are the bytes of
        each of the call's tensors at the largest sizes, empty where all sizes are fixed."""
        run = RegionRun(region, region.parameter_ids)
        return cls((run,), sizes=sizes or DataSizes(), input_bytes=input_bytes)

    @property
    def regions(self) -> tuple[RecordedRegion, ...]:
        """The recorded region of each run, in the order of the forward."""
        return tuple(run.region for run in self.runs)

    @property
    def places(self) -> tuple[tuple[object, ...], ...]:
        """The keys of the runs (`RegionRun.place`), in the order of the forward."""
        return tuple(run.place for run in self.runs)

    def parameters_of_runs(self, hooked: Collection[int] = ()) -> tuple[frozenset[int], ...]:
        """For each run, the numbers of the parameters among its inputs whose gradients it may add to `.grad` itself.

        Excluded are parameters with hooks that wait for the gradient (`hooked` has their `id`s), parameters whose
        gradients other code takes, and those that another run reads: autograd sums the gradients of several runs before
        it accumulates them."""
        readers = Counter(parameter for run in self.runs for parameter in set(run.parameter_ids.values()))
        return tuple(
            frozenset(
                number
                for number, parameter in run.parameter_ids.items()
                if parameter not in hooked and readers[parameter] == 1 and number not in run.passed.gradients
            )
            for run in self.runs
        )

    @property
    def graph(self) -> fx.GraphModule | None:
        """Dynamo's graph of a call that is one region; None for a call in several regions."""
        return self.runs[0].region.graph_module if self.whole else None


def together(known: CapturedCall, further: CapturedCall, margin: float = MARGIN) -> CapturedCall:
    """Two captures of a call merged into one to plan for, with the runs of regions of both in order. Each capture may
    lack some runs of the other.

    A run that has other sizes in `further` is planned for the larger ones, times `margin`. Where `further` has runs of
    other regions on the same parameters, those of `known` are dropped, since a forward runs only one of the two."""
    if [(run.place, run.passed) for run in known.runs] != [(run.place, run.passed) for run in further.runs]:
        known, further = (  # without references to other runs by number, as these may change
            replace(call, runs=tuple(replace(run, passed=run.passed.without_runs()) for run in call.runs))
            for call in (known, further)
        )
    runs: list[RegionRun] = []
    for kind, begin, end, other_begin, other_end in _blocks(known.runs, further.runs):
        ours, theirs = known.runs[begin:end], further.runs[other_begin:other_end]
        if kind == "equal":
            pairs = zip(ours, theirs, strict=True)
            runs += [
                replace(
                    larger := _larger(run, other, margin),
                    observed=most_observed(run.observed, other.observed) or larger.observed,
                    eager=run.eager | other.eager,
                    passed=run.passed if run.passed == other.passed else run.passed & other.passed,
                )
                for run, other in pairs
            ]
            continue
        taken = {parameter for run in theirs for parameter in run.parameter_ids.values()}
        runs += [run for run in ours if taken.isdisjoint(run.parameter_ids.values())]
        runs += theirs
    return replace(
        known,
        runs=tuple(runs),
        ending=known.ending | further.ending,
        returned_bytes=max(known.returned_bytes, further.returned_bytes),
        input_bytes=max(known.input_bytes, further.input_bytes, key=sum),
        eager=known.eager | further.eager,
    )


def known_places(before: Sequence[RegionRun], now: Sequence[RegionRun]) -> tuple[int | None, ...]:
    """For each run in `now`, the index in `before` of the run that a plan may treat as the same; None if there is
    none."""
    numbers: list[int | None] = []
    for kind, begin, end, now_begin, now_end in _blocks(before, now):
        numbers += range(begin, end) if kind == "equal" else [None] * (now_end - now_begin)
    return tuple(numbers)


def _blocks(runs: Sequence[RegionRun], others: Sequence[RegionRun]) -> Sequence[tuple[str, int, int, int, int]]:
    places, other_places = ([run.place for run in some] for some in (runs, others))
    return SequenceMatcher(None, places, other_places, autojunk=False).get_opcodes()


def with_eager_bytes(call: CapturedCall, factor: float) -> CapturedCall:
    """A copy of `call` with the bytes of the code between regions multiplied by `factor`."""
    runs = tuple(replace(run, eager=run.eager.scaled(factor)) for run in call.runs)
    return replace(call, runs=runs, ending=call.ending.scaled(factor))


def _larger(run: RegionRun, other: RegionRun, margin: float) -> RegionRun:
    """The run to plan in place of two at the same place: the one whose region has symbols for the sizes that differ,
    for the sizes of both."""
    if len(other.region.changing) > len(run.region.changing):
        needed = _sizes_for(other, run)
        return replace(other, most=tuple(math.ceil(margin * size) for size in needed))
    if not run.region.changing:
        return max(run, other, key=lambda one: sum(map(math.prod, one.shapes)))
    needed = other.sizes if run.region is other.region else _sizes_for(run, other)
    pairs = zip(run.sizes, needed, strict=True)
    most = tuple(
        limit if one == size else max(limit, math.ceil(margin * max(one, size)))
        for (one, size), limit in zip(pairs, run.most, strict=True)
    )
    seen = other.sizes if run.region is other.region else run.sizes
    return replace(run, sizes=seen, most=most)


def _sizes_for(run: RegionRun, other: RegionRun) -> Sizes:
    """The changing sizes of a run, all multiplied by the factor that its input shapes need to reach those of `other`, a
    run of another region."""
    pairs = zip(run.shapes, other.shapes, strict=False)
    ratios = (theirs / max(1, ours) for one, two in pairs for ours, theirs in zip(one, two, strict=False))
    growth = max([1.0, *ratios])
    return tuple(math.ceil(size * growth) for size in run.sizes)

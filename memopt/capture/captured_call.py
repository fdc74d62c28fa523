"""A training call as Dynamo captured it: the runs of its regions, in the order of the forward, with their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memopt.capture.between import EagerCodeBytes, Passed
from memopt.capture.data_sizes import DataSizes, Observed, limits_by_operators, match, without_limit
from memopt.capture.outputs import example_of
from memopt.capture.region import RecordedRegion, Sizes, parameter_ids
from memopt.compat.tensors import is_sharded
from memopt.device.storages import storage_bytes
from memopt.units import size
from passes.graphs.node_facts import graph_results


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

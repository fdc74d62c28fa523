"""A region of a training call as Dynamo recorded it: what planning starts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.author_modes import autocast_state
from memopt.capture.operators import OperatorGraph, operator_graph
from memopt.capture.outputs import detach_all_but_scalars
from memopt.compat.dynamo import capture_settings, tracing_again


@dataclass(eq=False)
class RecordedRegion:
    """One graph of a training call's forward, and what is needed to trace it outside of Dynamo's callback.

    A region is recorded once and compared by identity. It owns the operator graphs that were traced of it.
    """

    graph_module: fx.GraphModule
    parameter_ids: Mapping[int, int]
    """Number of an input that is a trainable parameter → `id` of the model's parameter when the region was recorded."""
    undifferentiated: frozenset[int]
    """Positions of the outputs that require gradients in the plain model and get none here."""
    tracing_context: Callable[[], AbstractContextManager[Any]] = field(repr=False)
    _operator_graphs: dict[tuple[str, str], OperatorGraph] = field(default_factory=dict, repr=False)
    """By the type of device that is planned for and the autocast at hand: two or three of them at most."""

    @classmethod
    def record(
        cls,
        graph_module: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        differentiate_all: bool,
        real_ids: Mapping[int, int] | None = None,
    ) -> RecordedRegion:
        """Record a region, in Dynamo's backend. Edits the graph: unless `differentiate_all`, its outputs but the loss
        are detached.

        `inputs` are what Dynamo hands to the backend; where they are fakes, `real_ids` maps the `id` of a fake
        parameter to that of the model's own.
        """
        undifferentiated = frozenset() if differentiate_all else detach_all_but_scalars(graph_module)
        known = real_ids or {}
        ids = {number: known.get(id(inputs[number]), id(inputs[number])) for number in parameter_numbers(inputs)}
        return cls(graph_module, ids, undifferentiated, tracing_again())

    @property
    def parameters(self) -> frozenset[int]:
        """Numbers of the inputs that are trainable parameters."""
        return frozenset(self.parameter_ids)

    @property
    def differentiable(self) -> bool:
        """Whether gradients flow through it."""
        (results,) = self.graph_module.graph.output_node().args
        values = (node.meta.get("example_value") for node in results if isinstance(node, fx.Node))  # type: ignore[union-attr]
        return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    @property
    def inputs(self) -> list[Any]:
        """The fakes that Dynamo traced the region with."""
        return [node.meta["example_value"] for node in self.graph_module.graph.find_nodes(op="placeholder")]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Context in which the region may be traced and compiled, as within Dynamo's callback."""
        with capture_settings(), self.tracing_context():
            yield

    def operator_graph(self, planned_for: str = "") -> OperatorGraph:
        """The region in operators; autocast casts as on the type of device `planned_for`. Traced once.

        Raises `Untraceable` where its meaning would be lost.
        """
        key = planned_for, autocast_state()
        if key not in self._operator_graphs:
            with self.tracing():
                graph = operator_graph(self.graph_module, self.inputs, self.parameters, planned_for)
            self._operator_graphs[key] = graph
        return self._operator_graphs[key]


def parameter_numbers(inputs: Sequence[Any]) -> frozenset[int]:
    """Which of a region's inputs are trainable parameters."""
    return frozenset(
        number for number, value in enumerate(inputs) if isinstance(value, nn.Parameter) and value.requires_grad
    )


@dataclass(frozen=True)
class RegionRun:
    """One run of a region in a training call."""

    region: RecordedRegion
    parameter_ids: Mapping[int, int]
    """Number of an input that is a trainable parameter → `id` of the parameter that this run was given."""

    @classmethod
    def of(cls, region: RecordedRegion, inputs: Sequence[Any], real_ids: Mapping[int, int] | None = None) -> RegionRun:
        """The run of a region on these inputs; `real_ids` as for `RecordedRegion.record`."""
        known = real_ids or {}
        ids = {number: id(inputs[number]) for number in parameter_numbers(inputs)}
        return cls(region, {number: known.get(parameter, parameter) for number, parameter in ids.items()})


@dataclass(frozen=True)
class CapturedCall:
    """A training call as it was recorded: the runs of its regions in the order of the forward."""

    runs: tuple[RegionRun, ...]
    break_reason: str = ""
    """Why the forward breaks into several regions; empty for a call that is one region."""
    between_bytes: int = 0
    """The most that the eager code between the regions holds at once."""

    @property
    def whole(self) -> bool:
        """Whether the call is one region, without graph breaks."""
        return not self.break_reason

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know of the capture."""
        if self.whole:
            return ()
        return (f"captured in {len(self.runs)} regions, since {self.break_reason}; what runs between is not planned",)

    @classmethod
    def of(cls, region: RecordedRegion) -> CapturedCall:
        """A call that is one region."""
        return cls((RegionRun(region, region.parameter_ids),))

    def parameters_of_runs(self, hooked: Collection[int] = ()) -> tuple[frozenset[int], ...]:
        """For each run the numbers of the parameters whose gradients it may add to `.grad` itself: no hook waits for
        them (`hooked` holds `id`s), and no other run reads them, since autograd sums the gradients of several runs
        before it adds them."""
        readers = Counter(parameter for run in self.runs for parameter in set(run.parameter_ids.values()))
        return tuple(
            frozenset(
                number
                for number, parameter in run.parameter_ids.items()
                if parameter not in hooked and readers[parameter] == 1
            )
            for run in self.runs
        )

    @property
    def graph(self) -> fx.GraphModule | None:
        """What Dynamo made of a call that is one region; None for one in several regions."""
        return self.runs[0].region.graph_module if self.whole else None

"""Training calls whose forward breaks into regions: planned all together, compiled region by region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from memopt.capture.dynamo import compile_call, example_inputs, lower
from memopt.capture.inputs import Call
from memopt.capture.joint import JointGraph
from memopt.capture.outputs import hand_out
from memopt.compat import tracing_again
from memopt.emit.partition import partition
from memopt.errors import CaptureError
from memopt.planning.region_schedule import RegionSchedule
from memopt.planning.state import State
from memopt.run.pending import PendingForward

if TYPE_CHECKING:
    from memopt.run.training import TrainingCalls


class RegionCalls:
    """Calls of one signature whose forward breaks into regions, planned all together before the first runs.

    The runs of a forward are counted, and each has a schedule of its own, also where Dynamo compiles one region for
    all of them (a block called in a loop).
    """

    def __init__(self, calls: TrainingCalls, state: State, call: Call) -> None:
        self.calls = calls
        self.plan = calls.planner.plan_ahead(call, state)
        self.forward: PendingForward | None = None
        assert self.plan.captured is not None
        self.regions = self.plan.captured.regions
        self._run = compile_call(calls.to_capture(), self._lower, whole=False)

    def run(self, call: Call, forward: PendingForward) -> Any:
        self.forward = forward
        try:
            return self._run(*call[0], **call[1])
        finally:
            self.forward = None

    def next_run(self, fingerprint: str) -> int:
        """The number of the run that begins now. Raises `CaptureError` where it was not planned."""
        assert self.forward is not None
        number = self.forward.regions_run
        if number >= len(self.regions) or self.regions[number].fingerprint != fingerprint:
            raise CaptureError(
                "the forward took another way than when it was planned: it depends on the values of its inputs outside "
                "of any captured region; mend the graph break, or add 'plain' to allow to run it unplanned"
            )
        return number

    def _lower(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend for a region."""
        try:
            region = _Region(self, graph_module, inputs)
        except CaptureError:
            return self.eager(graph_module)
        return region.unplanned or region

    def eager(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """The region unplanned, where the user allows that; inside of an `except CaptureError`."""
        if "plain" not in self.calls.options.allow:
            raise
        self.calls.unplanned = True
        return graph_module.forward


class _Region:
    """A compiled region: lowered once for each schedule that its runs have."""

    def __init__(self, owner: RegionCalls, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.owner, self.graph_module = owner, graph_module
        self.again: Callable[[], AbstractContextManager[Any]] = tracing_again()
        self.variants: dict[tuple[RegionSchedule, frozenset[int]], Callable[..., Any]] = {}
        self.fingerprint = ""
        self.unplanned: Callable[..., Any] | None = None
        compiled = self.lower(inputs)
        if not self.variants:
            self.unplanned = compiled

    def __call__(self, *args: Any) -> Any:
        try:
            number = self.owner.next_run(self.fingerprint)
        except CaptureError:
            return self.owner.eager(self.graph_module)(*args)
        if self.key(number) not in self.variants:
            with self.again():
                self.lower(example_inputs(self.graph_module))  # not those of the first run: they would live on here
        forward = self.owner.forward
        assert forward is not None
        forward.regions_run += 1
        return hand_out(self.variants[self.key(number)](*args), frozenset(), forward)

    def key(self, number: int) -> tuple[RegionSchedule, frozenset[int]]:
        return self.owner.plan.regions[number], self.owner.regions[number].parameter_inputs

    def lower(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Lower for the run that begins now."""
        keys: list[tuple[RegionSchedule, frozenset[int]]] = []

        def cut(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            self.fingerprint = joint.fingerprint
            keys.append(self.key(self.owner.next_run(joint.fingerprint)))
            schedule, parameters = keys[0]
            return partition(replace(joint, parameter_inputs=parameters), schedule, self.owner.calls.accumulation)

        assert self.owner.plan.captured is not None
        rewriting = replace(self.owner.plan.captured.rewriting, needed="")  # it has work in some region
        compiled = lower(self.graph_module, inputs, frozenset(), cut, rewriting).run
        self.variants.update(dict.fromkeys(keys, compiled))
        return compiled

"""From a recorded region to its joint graph: rewritten by passes, then differentiated by AOTAutograd or inductor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.capture.author_modes import Untraceable, autocast_is_on
from memopt.capture.inductor_trace import trace_by_inductor
from memopt.capture.joint import JointGraph
from memopt.capture.operators import (
    NothingToRewrite,
    Operators,
    Rewriting,
    needs_operators,
    rewrite,
    to_differentiate,
)
from memopt.capture.region import CapturedCall, RecordedRegion
from memopt.compat.dispatch import without_autocast
from memopt.compat.joint_trace import AotTrace, trace_region
from memopt.compat.symbols import data_symbols_of
from memopt.errors import CaptureError

INDUCTOR = "inductor"


@dataclass(frozen=True, eq=False)
class RegionTrace:
    """What a region's joint graph was traced from, and what makes its halves callable again."""

    region: RecordedRegion
    module: fx.GraphModule = field(repr=False)
    """What was differentiated: Dynamo's graph, or the operator graph after the passes."""
    backend: str
    """"aten" or "inductor": whose decompositions the joint graph has."""
    autocast: torch.dtype | None
    """The dtype of the autocast that the region runs under, where casts of our own could not be inserted."""
    rewritten: bool
    aot: AotTrace | None = field(default=None, repr=False)
    """For plain operators; inductor traces once more when it compiles."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the region is traced and compiled."""
        with self.region.tracing(), self._fence():
            yield

    def run_without_gradients(self, *inputs: Any) -> Any:
        """The outputs of a region that nothing is differentiated through, operator by operator."""
        with self._fence():
            return self.module(*inputs)

    def _fence(self) -> AbstractContextManager[Any]:
        """No autocast around a graph that has its casts in it; the plan's around one that could not get them."""
        if self.rewritten:
            return without_autocast()
        if self.autocast is None or autocast_is_on():
            return nullcontext()
        tensors = (value for value in self.region.inputs if isinstance(value, torch.Tensor))
        device = next((tensor.device.type for tensor in tensors), "cpu")
        return torch.autocast(device, dtype=self.autocast)


def backend_of(region: RecordedRegion, wanted: str) -> str:
    """What compiles a region: sizes that depend on data are guarded by calls that only plain operators can hold."""
    values = (node.meta.get("example_value") for node in region.graph_module.graph.nodes)
    return "aten" if any(map(data_symbols_of, values)) else wanted


def trace(region: RecordedRegion, rewriting: Rewriting, backend: str = "aten") -> JointGraph:
    """The joint graph of a region after what `rewriting` does to its operator graph; one without gradients has none in
    it (`JointGraph.differentiated`).

    Raises `PassError`, and `NothingToRewrite` where the decision that is needed finds nothing to do.
    """
    backend = backend_of(region, backend)
    operators = _rewritten_operators(region, rewriting)
    rewritten = operators is not None and bool(operators.stages)
    module = to_differentiate(operators) if operators is not None and rewritten else region.graph_module
    traced = RegionTrace(region, module, backend, rewriting.autocast, rewritten)
    decide_joint = None if autocast_is_on() else rewriting.joint
    with traced.active():
        if backend == INDUCTOR:
            found = trace_by_inductor(module, region.inputs)
        else:
            aot = trace_region(module, region.inputs)
            traced, found = replace(traced, aot=aot), (aot.module, aot.forward_outputs)
        joint, forward_outputs = found
        if joint is None:
            return JointGraph(traced.module, 0, operators=operators, trace=traced, differentiated=False)
        return JointGraph.of(
            joint,
            forward_outputs,
            region.parameters,
            operators,
            decide_joint,
            fused=backend == INDUCTOR,
            reinplace=rewriting.reinplace,
            trace=traced,
        )


def trace_call(captured: CapturedCall, rewriting: Rewriting, backend: str = "aten") -> tuple[JointGraph, ...]:
    """The joint graphs of all runs of a call, each region traced once; runs without gradients are left out.

    Raises `CaptureError` where there is nothing to differentiate, `PassError`, and `NothingToRewrite` where the
    decision that is needed has nothing to do in any region.
    """
    regional = rewriting if captured.whole else replace(rewriting, needed="")
    backend = backend if captured.whole else "aten"
    regions = {id(run.region): run.region for run in captured.runs}
    traced = {number: trace(region, regional, backend) for number, region in regions.items()}
    joints = tuple(traced[id(run.region)] for run in captured.runs if traced[id(run.region)].differentiated)
    if not joints:
        raise CaptureError("what it returns depends on no trainable parameter")
    if not captured.whole:
        _check_needed(joints, rewriting.needed)
    return joints


def accumulating(
    joints: Sequence[JointGraph], captured: CapturedCall, hooked: Collection[int] = ()
) -> tuple[JointGraph, ...]:
    """The joint graphs of a call's runs, each with the parameters whose gradients that run may add to `.grad` itself.

    `hooked` holds the `id`s of parameters whose gradients hooks wait for: autograd hands those over.
    """
    differentiated = {id(joint.trace.region) for joint in joints}
    runs = zip(captured.runs, captured.parameters_of_runs(hooked), strict=True)
    numbers = [parameters for run, parameters in runs if id(run.region) in differentiated]
    return tuple(joint.accumulating(parameters) for joint, parameters in zip(joints, numbers, strict=True))


def _check_needed(joints: Sequence[JointGraph], label: str) -> None:
    """Raise `NothingToRewrite` if the needed decision found nothing to do in any region."""
    idle: list[NothingToRewrite] = []
    for joint in joints:
        try:
            (joint.operators or Operators()).check_needed(label)
        except NothingToRewrite as nothing:
            idle.append(nothing)
    if len(idle) == len(joints):
        raise idle[0]


def _rewritten_operators(region: RecordedRegion, rewriting: Rewriting) -> Operators | None:
    """The region's operator graph, rewritten; None where nothing asks for one."""
    if not torch.is_grad_enabled() or not (rewriting or needs_operators(region.graph_module)):
        return None
    try:
        graph = region.operator_graph(rewriting.planned_for)
    except Untraceable as reason:
        instead = f"; it runs under torch.autocast with {rewriting.autocast}" if rewriting.autocast else ""
        operators = Operators(notes=(f"a region is not rewritten by passes, since {reason}{instead}",))
    else:
        operators = rewrite(graph, rewriting.deciders, rewriting.needed)
    operators.check_needed(rewriting.needed)
    return operators

"""Traces a recorded region into its joint graph: passes rewrite it, then AOTAutograd or inductor differentiates it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from memopt.capture.author_modes import Untraceable, autocast_is_on
from memopt.capture.between import EagerBytes, Passed
from memopt.capture.data_sizes import DataSizes
from memopt.capture.dynamo import in_brief
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
from memopt.capture.region import CapturedCall, RecordedRegion, RegionRun
from memopt.compat.fakes import fresh_fakes
from memopt.compat.host import HOST
from memopt.compat.joint_trace import AotTrace, trace_region
from memopt.compat.operators import without_autocast
from memopt.compat.symbols import data_symbols_of
from memopt.compat.true_results import RaisingForRefusedDtypes
from memopt.errors import CaptureError
from memopt.recent import Recent
from passes import is_random
from passes.graphs.node_facts import is_tangent

INDUCTOR = "inductor"
_MOST_TRACES = 256
"""The number of joint graphs that are kept."""


@dataclass(frozen=True, eq=False)
class RegionTrace:
    """The source of a region's joint graph, from which its halves are compiled."""

    region: RecordedRegion
    module: fx.GraphModule = field(repr=False)
    """The differentiated module: Dynamo's graph, or the operator graph after the passes."""
    autocast: torch.dtype | None
    """The autocast dtype that the region runs under where casts could not be inserted by passes."""
    backend: str
    """"aten" or "inductor": whose decompositions the joint graph has."""
    rewritten: bool
    """Whether `module` is an operator graph, with all casts written out."""
    aot: AotTrace | None = field(default=None, repr=False)
    """AOTAutograd's trace for the "aten" backend; inductor traces again when it compiles."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the region is traced and compiled."""
        with self.region.tracing(), self.region.autocast.restored(), self._autocast():
            yield

    def _autocast(self) -> AbstractContextManager[Any]:
        """No autocast around a graph that has its casts written out; the plan's autocast around one that has not."""
        return without_autocast() if self.rewritten else _autocast_to(self.autocast, self.region)


def _autocast_to(dtype: torch.dtype | None, region: RecordedRegion) -> AbstractContextManager[Any]:
    """Autocast to a dtype on the device of a region; nothing where it is on already, or the dtype is None."""
    if dtype is None or autocast_is_on():
        return nullcontext()
    tensors = (value for value in region.inputs if isinstance(value, torch.Tensor))
    return torch.autocast(next((tensor.device.type for tensor in tensors), HOST.type), dtype=dtype)


def _not_rewritten(region: RecordedRegion, rewriting: Rewriting) -> tuple[fx.GraphModule, torch.dtype | None]:
    """The graph of a region that passes do not rewrite, and the autocast dtype that it runs under: none where its
    author's code fails under autocast."""
    if autocast_is_on() or rewriting.autocast is None or _fails_under_autocast(region, rewriting.autocast):
        return region.graph_module, None
    return region.for_autocast, rewriting.autocast


def _fails_under_autocast(region: RecordedRegion, dtype: torch.dtype) -> str:
    """The error of a region's code under autocast and not without it, such as an operator that has no kernel for the
    dtype; else empty."""
    known = region.failures_under_autocast
    if dtype not in known:
        failure = _failure(region, dtype)
        known[dtype] = failure if failure and not _failure(region, None) else ""
    return known[dtype]


def _failure(region: RecordedRegion, autocast: torch.dtype | None) -> str:
    """The error of a region's code on fakes; empty where it has none."""
    with region.tracing(), _autocast_to(autocast, region):
        mode, fakes = fresh_fakes(region.inputs)
        try:
            with mode, RaisingForRefusedDtypes():
                region.for_autocast(*fakes)
        except RuntimeError as failure:
            return in_brief(failure)
    return ""


def forward_as_planned(region: RecordedRegion, rewriting: Rewriting) -> Callable[..., Any]:
    """A region's forward without gradients, which computes in the dtypes that the rewriting gives it."""
    with region.autocast.restored():
        operators = _rewritten_operators(region, replace(rewriting, needed=""))
        stages = operators.stages if operators is not None else ()
        module, low = (stages[-1], None) if stages else _not_rewritten(region, rewriting)

    def forward(*inputs: Any) -> Any:
        with without_autocast() if stages else _autocast_to(low, region):
            return module.forward(*inputs)

    return forward


def backend_of(region: RecordedRegion, wanted: str) -> str:
    """The backend for a region: "aten" where it has sizes that depend on data, because they are checked by calls that
    inductor cannot compile, else `wanted`."""
    values = (node.meta.get("example_value") for node in region.graph_module.graph.nodes)
    return "aten" if any(map(data_symbols_of, values)) else wanted


def trace(region: RecordedRegion, rewriting: Rewriting, backend: str = "aten") -> JointGraph:
    """The joint graph of a region, rewritten as `rewriting` says; for a region without gradients its forward
    (`JointGraph.differentiated` is false).

    Raises `PassError`, and `NothingToRewrite` where the needed decision has no passes.
    """
    with region.autocast.restored():
        return _trace(region, rewriting, backend_of(region, backend))


def _trace(region: RecordedRegion, rewriting: Rewriting, backend: str) -> JointGraph:
    """As `trace`, under the region's autocast and with a backend that is for it."""
    operators = _rewritten_operators(region, rewriting)
    if operators is not None and operators.stages:
        traced = RegionTrace(region, to_differentiate(operators), None, backend, rewritten=True)
    else:
        traced = RegionTrace(region, *_not_rewritten(region, rewriting), backend, rewritten=False)
    decide_joint = None if autocast_is_on() else rewriting.joint
    with traced.active():
        if backend == INDUCTOR:
            found = trace_by_inductor(traced.module, region.inputs)
        else:
            aot = trace_region(traced.module, region.inputs)
            traced, found = replace(traced, aot=aot), (aot.module, aot.forward_outputs)
        joint, forward_outputs = found
        if joint is None:
            return JointGraph(traced.module, 0, operators=operators, trace=traced, differentiated=False)
        places = traced.aot.places if traced.aot is not None and region.wrapped else ()
        if places and len(list(filter(is_tangent, joint.graph.nodes))) > 1:
            raise CaptureError(
                "it returns several losses, whose gradients in split parameters cannot be told apart; have it return "
                "their sum"
            )
        found_joint = JointGraph.of(
            joint,
            forward_outputs,
            frozenset(places[number] for number in region.parameters) if places else region.parameters,
            operators,
            decide_joint,
            fused=backend == INDUCTOR,
            reinplace=rewriting.reinplace,
            released=_released(region, joint, backend),
        )
        if traced.aot is not None:
            traced = replace(traced, aot=traced.aot.of(found_joint.module))
        gradient_places = traced.aot.gradient_places if traced.aot is not None and places else ()
        return replace(found_joint, trace=traced, places=places, gradient_places=gradient_places)


def _released(region: RecordedRegion, joint: fx.GraphModule, backend: str) -> frozenset[int]:
    """The results that a second forward can replace: none where inductor draws other random numbers than the plain
    forward does."""
    draws = any(is_random(node) or "inductor_seed" in str(node.target) for node in joint.graph.nodes)
    if region.withheld is None or (backend == INDUCTOR and draws):
        return frozenset()
    return region.withheld.released


def trace_call(
    captured: CapturedCall, rewriting: Rewriting, backend: str = "aten", traces: Traces | None = None
) -> tuple[JointGraph, ...]:
    """The joint graphs of all runs of a call, each region traced once; runs without gradients are left out.

    `traces` holds those that were traced before.

    Raises `CaptureError` where no gradient flows to any parameter, `PassError`, and `NothingToRewrite` where the
    needed decision has no passes in any region.
    """
    regional = rewriting if captured.whole else replace(rewriting, needed="")
    backend = backend if captured.whole else "aten"
    regions = {id(run.region): run.region for run in captured.runs}
    traces = Traces() if traces is None else traces
    traced = {number: traces.of(region, regional, backend) for number, region in regions.items()}
    joints = tuple(traced[id(run.region)] for run in captured.runs if traced[id(run.region)].differentiated)
    if not joints:
        raise CaptureError("its result depends on no trainable parameter")
    if not captured.whole:
        _check_needed(joints, rewriting.needed)
    return joints


class Traces:
    """The joint graphs of regions that were traced last, so that a region is traced once however many calls have it."""

    def __init__(self) -> None:
        self._joints: Recent[tuple[RecordedRegion, str], list[tuple[Rewriting, JointGraph]]] = Recent(_MOST_TRACES)
        """By region and backend: its joint graph under each rewriting, of which there are as many as lever sets."""

    def of(self, region: RecordedRegion, rewriting: Rewriting, backend: str = "aten") -> JointGraph:
        """The joint graph of a region under a rewriting. Raises as `trace`."""
        known = self._joints.get((region, backend)) or []
        for other, joint in known:
            if other is rewriting or other == rewriting:
                return joint
        joint = trace(region, rewriting, backend)
        self._joints[region, backend] = [*known, (rewriting, joint)]
        return joint


def differentiated_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[RegionRun, ...]:
    """The runs of a call that have a joint graph in `trace_call`'s result: not those without gradients."""
    differentiated = {id(joint.trace.region) for joint in joints}
    return tuple(run for run in captured.runs if id(run.region) in differentiated)


def sizes_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[DataSizes, ...]:
    """The changing sizes of the runs that have a joint graph."""
    runs = differentiated_runs(joints, captured)
    return tuple(run.sizes_in(joint.module.graph) for joint, run in zip(joints, runs, strict=True))


def trained(joints: Sequence[JointGraph], captured: CapturedCall) -> frozenset[int]:
    """The `id`s of the parameters that get gradients: from the runs that have a joint graph in `trace_call`'s result,
    or from eager code between regions. A region may read others for outputs that are not differentiated."""
    runs = zip(joints, differentiated_runs(joints, captured), strict=True)
    return captured.eager.union(
        *(
            [parameter for number, parameter in run.parameter_ids.items() if number in joint.inputs_with_gradients]
            for joint, run in runs
        )
    )


def eager_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[EagerBytes, ...]:
    """The bytes of eager code around the runs that have a joint graph, those around the others with them; at the end,
    as `before` and `during`, those after the last backward and after the forward."""
    scheduled = set(map(id, differentiated_runs(joints, captured)))
    found: list[EagerBytes] = []
    skipped = EagerBytes()
    for run in captured.runs:
        if id(run) in scheduled:
            found.append(replace(run.eager, before=max(run.eager.before, skipped.before)))
            skipped = EagerBytes()
        else:
            skipped |= EagerBytes(max(run.eager.before, run.eager.during))
            if found:  # its backward runs before that of the run before it
                later = max(run.eager.before_backward, run.eager.during_backward)
                found[-1] |= EagerBytes(before_backward=later)
    return (*found, EagerBytes(captured.after_bytes, captured.held_bytes))


def passed_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[Passed, ...]:
    """`RegionRun.passed` of the runs that have a joint graph. Where some run has none, the numbers of the others
    change, and references to runs by number are dropped."""
    passed = tuple(run.passed for run in differentiated_runs(joints, captured))
    return passed if len(passed) == len(captured.runs) else tuple(one.without_runs() for one in passed)


def accumulating(
    joints: Sequence[JointGraph], captured: CapturedCall, hooked: Collection[int] = ()
) -> tuple[JointGraph, ...]:
    """The joint graphs of a call's runs, each with the parameters whose gradients that run may add to `.grad` itself.

    `hooked` holds the `id`s of parameters whose gradients hooks wait for: autograd hands those over. So it does with
    gradients of wrappers, which AOTAutograd makes from the graph's results.
    """
    differentiated = {id(joint.trace.region) for joint in joints}
    runs = zip(captured.runs, captured.parameters_of_runs(hooked), strict=True)
    numbers = [parameters - run.region.wrapped for run, parameters in runs if id(run.region) in differentiated]
    return tuple(
        joint.accumulating(frozenset(map(joint.place_of, parameters)))
        for joint, parameters in zip(joints, numbers, strict=True)
    )


def _check_needed(joints: Sequence[JointGraph], label: str) -> None:
    """Raise `NothingToRewrite` if the decision with this label has no passes in any region."""
    idle: list[NothingToRewrite] = []
    for joint in joints:
        try:
            (joint.operators or Operators()).check_needed(label)
        except NothingToRewrite as nothing:
            idle.append(nothing)
    if len(idle) == len(joints):
        raise idle[0]


def _rewritten_operators(region: RecordedRegion, rewriting: Rewriting) -> Operators | None:
    """The region's rewritten operator graph; None where neither passes nor autocast need one."""
    if not torch.is_grad_enabled() or not (rewriting or needs_operators(region.graph_module)):
        return None
    try:
        graph = region.operator_graph(rewriting.planned_for)
    except Untraceable as reason:
        note = f"a region is not rewritten by passes, since {reason}{_instead(region, rewriting.autocast)}"
        operators = Operators(notes=(note,))
    else:
        operators = rewrite(graph, rewriting.deciders, rewriting.needed)
    operators.check_needed(rewriting.needed)
    return operators


def _instead(region: RecordedRegion, low: torch.dtype | None) -> str:
    """How a region that passes do not rewrite gets its dtypes, as the end of a sentence."""
    if low is None or autocast_is_on():
        return ""
    failure = _fails_under_autocast(region, low)
    if failure:
        return f", and keeps the dtypes of its code, which fails under torch.autocast with {low} ({failure})"
    return f"; it runs under torch.autocast with {low}"

"""The joint graph of a recorded region, by AOTAutograd or inductor, and facts of a call's joint graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.captured_call import CapturedCall, EagerCodeBytes, Passed, RegionRun
from memopt.capture.data_sizes import DataSizes
from memopt.capture.joint import JointGraph
from memopt.capture.operators import DecideJoint, Operators
from memopt.capture.region import RecordedRegion
from memopt.capture.stamp import trace_blocks_once
from memopt.compat.host import device_among
from memopt.compat.inductor import InductorFailed, compile_by_inductor, draw_seeds_at_once, seeds_apart
from memopt.compat.joint_trace import AotTrace, InputUse, JointGraphTraced, noting_input_use, trace_region
from memopt.compat.operators import without_autocast
from memopt.errors import CaptureError
from passes import copy_graph_module, is_random
from passes.compat import replaced_all
from passes.graphs.edit import on_stored_values, refresh
from passes.graphs.node_facts import graph_results, is_tangent, tensors

_Trace = TypeVar("_Trace", "AotTrace", "_InductorTrace")


@dataclass(frozen=True)
class _InductorTrace:
    """A region as inductor has traced it, before its joint graph is cut into forward and backward."""

    module: fx.GraphModule | None
    """The joint graph after inductor's decompositions and passes; None for a region without gradients."""
    forward_outputs: int
    """The number of outputs of the forward, which come first among the outputs of the joint graph."""
    inputs: InputUse
    """Which of its inputs the region writes to, and which it only reads."""


def trace_by_inductor(module: fx.GraphModule, inputs: Sequence[Any]) -> _InductorTrace:
    """Trace a region with inductor, up to its partition, each random operator with a seed of its own. To be called in
    the region's tracing context.

    Raises `CaptureError` where inductor fails."""
    found: list[tuple[fx.GraphModule, int]] = []
    used: list[InputUse] = []

    def take_joint(joint: fx.GraphModule, *_: Any, num_fwd_outputs: int, **__: Any) -> Any:
        _tag_forward(joint.graph, num_fwd_outputs)
        lay_out_again(joint.graph)
        found.append((joint, num_fwd_outputs))
        raise JointGraphTraced

    try:
        # A copy, because inductor changes the module that it compiles.
        with suppress(JointGraphTraced), replaced_all([noting_input_use(used), seeds_apart()]):
            # Of a region without gradients inductor compiles the forward, which is returned as it is.
            given = copy_graph_module(module), list(inputs), take_joint, lambda compiled, *_: compiled
            compile_by_inductor(*given, lambda: "no plan")
    except InductorFailed as failure:
        raise not_compiled(failure) from failure
    return _InductorTrace(*found[0], used[0]) if found else _InductorTrace(None, 0, InputUse())


def _tag_forward(graph: fx.Graph, forward_outputs: int) -> None:
    """Mark all operators that an output of the forward needs as the forward's. Where a pass of inductor replaces an
    operator by an equal one (`x - zeros` by `x`), it may give that one the mark of the backward."""
    needed = [result for result in graph_results(graph)[:forward_outputs] if isinstance(result, fx.Node)]
    seen = set(needed)
    while needed:
        node = needed.pop()
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["partitioner_tag"] = "is_forward"
        needed += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)


def lay_out_again(graph: fx.Graph) -> None:
    """Correct the strides in the stored values (`meta["val"]`) of calls that read what inductor has put into the graph,
    and of their readers. A view that the corrected strides do not allow becomes a reshape.

    Inductor replaces an attention that is written out by `scaled_dot_product_attention`; on a CUDA card it pads matrix
    products whose kernels are then faster (`shape_padding`), and takes a slice of the padded one. The strides may be
    others than before, but the stored values of the nodes that read the results stay as they were."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    changed = {node for node in calls if "seq_nr" not in node.meta}  # which the calls of AOTAutograd have
    with on_stored_values(graph):
        for node in calls:
            if changed.isdisjoint((node, *node.all_input_nodes)):
                continue
            stored = node.meta.get("val")
            try:
                refresh(node)
            except (RuntimeError, ValueError):
                if node.target is not torch.ops.aten.view.default:
                    raise
                node.target = torch.ops.aten.reshape.default  # as inductor lowers a view
                refresh(node)
            before, after = ([one.stride() for one in tensors(value)] for value in (stored, node.meta["val"]))
            if before != after:
                changed.add(node)
            else:
                node.meta["val"] = stored


def not_compiled(failure: InductorFailed) -> CaptureError:
    """The error for a user that inductor failed to compile a region."""
    reason = " ".join(str(failure).split())[:300]
    return CaptureError(f"inductor cannot compile a region of the model: {reason}; give optimize backend='aten'")


INDUCTOR = "inductor"


@dataclass(frozen=True, eq=False)
class RegionTrace:
    """The module of a region before differentiation, and the settings with which the module is traced to a joint graph
    and compiled to a forward and a backward."""

    region: RecordedRegion
    module: fx.GraphModule = field(repr=False)
    """The module that is differentiated: Dynamo's graph, or the operator graph after the passes."""
    autocast: torch.dtype | None
    """The autocast dtype that the region runs under where casts could not be inserted by passes."""
    backend: str
    """"aten" or "inductor": whose decompositions the joint graph has."""
    rewritten: bool
    """Whether `module` is an operator graph, with all casts written out."""
    aot: AotTrace | None = field(default=None, repr=False)
    """AOTAutograd's trace for the "aten" backend; inductor traces again when it compiles."""
    inputs: InputUse = field(default_factory=InputUse)
    """Which of its inputs the region writes to, and which it only reads."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which the region can be traced and compiled."""
        # A graph that contains its casts as operators has no autocast around it.
        autocast = without_autocast() if self.rewritten else autocast_to(self.autocast, self.region)
        with self.region.tracing(), self.region.modes.restored(), autocast:
            yield


def autocast_to(
    dtype: torch.dtype | None, region: RecordedRegion, *, keeps_casts: bool = True
) -> AbstractContextManager[Any]:
    """Context of autocast to `dtype` on the region's device; does nothing where autocast is on already or `dtype` is
    None. With `keeps_casts`, casts of weights are cached until the context ends; else each use casts them again."""
    if dtype is None or autocast_is_on():
        return nullcontext()
    return torch.autocast(device_among(region.inputs).type, dtype=dtype, cache_enabled=keeps_casts)


def differentiate(
    traced: RegionTrace, operators: Operators | None, decide: DecideJoint | None, *, reinplace: bool
) -> JointGraph:
    """The joint graph of a region, traced from the module in `traced`; for a region without gradients only the forward
    (`JointGraph.differentiated` is False).

    `operators` has the region's operator graph before and after each pass; None if neither passes nor autocast need
    that graph. `decide` and `reinplace` are as for `JointGraph.of`. Raises `CaptureError` where inductor fails, where
    the traced graph lacks metadata, and where a region that reads parameters split over ranks returns several losses.
    Raises `PassError` where a pass fails."""
    region = traced.region
    with traced.active():
        found: AotTrace | _InductorTrace
        aot: AotTrace | None = None
        if traced.backend == INDUCTOR:
            found = _blocks_once(trace_by_inductor, traced.module, region)
            if found.module is not None:
                draw_seeds_at_once(found.module)
        else:
            found = aot = _blocks_once(trace_region, traced.module, region)
        joint, traced = found.module, replace(traced, aot=aot, inputs=found.inputs)
        if joint is None:
            return JointGraph(traced.module, 0, operators=operators, trace=traced, differentiated=False)
        places = aot.places if aot is not None and region.wrapped else ()
        if places and len(list(filter(is_tangent, joint.graph.nodes))) > 1:
            raise CaptureError(
                "the model returns several losses, whose gradients in parameters split over ranks cannot be told "
                "apart; have it return their sum"
            )
        canonical = JointGraph.of(
            joint,
            found.forward_outputs,
            frozenset(places[number] for number in region.parameters) if places else region.parameters,
            operators,
            decide,
            fused=traced.backend == INDUCTOR,
            reinplace=reinplace,
            released=_released(region, joint, traced.backend),
        )
        if aot is not None:
            aot = aot.of(canonical.module)
            traced = replace(traced, aot=aot)
        gradient_places = aot.gradient_places if aot is not None and places else ()
        return replace(canonical, trace=traced, places=places, gradient_places=gradient_places)


def _blocks_once(
    trace: Callable[[fx.GraphModule, Sequence[Any]], _Trace], module: fx.GraphModule, region: RecordedRegion
) -> _Trace:
    """What `trace` returns for a region's module and inputs, with each kind of block traced once."""
    inputs = region.inputs
    if region.wrapped or not region.differentiable:
        return trace(module, inputs)
    return trace_blocks_once(lambda reduced: trace(reduced, inputs), module, inputs, region.written)


def _released(region: RecordedRegion, joint: fx.GraphModule, backend: str) -> frozenset[int]:
    """The positions of the forward's results that a second forward can replace: none where inductor draws other random
    numbers than the plain forward does."""
    draws = any(is_random(node) or "inductor_seed" in str(node.target) for node in joint.graph.nodes)
    if region.deferred is None or (backend == INDUCTOR and draws):
        return frozenset()
    return region.deferred.released


def differentiated_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[RegionRun, ...]:
    """The runs of a call that have a joint graph in `joints`: all but those without gradients."""
    differentiated = {id(joint.trace.region) for joint in joints}
    return tuple(run for run in captured.runs if id(run.region) in differentiated)


def sizes_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[DataSizes, ...]:
    """The changing and data-dependent sizes of each run that has a joint graph, in the order of the runs."""
    runs = differentiated_runs(joints, captured)
    return tuple(run.sizes_in(joint.module.graph) for joint, run in zip(joints, runs, strict=True))


def trained(joints: Sequence[JointGraph], captured: CapturedCall) -> frozenset[int]:
    """The `id`s of the parameters that get gradients from the runs with joint graphs or from eager code between
    regions. Parameters that are read only for outputs that are not differentiated are not among them."""
    found = set(captured.eager)
    for joint, run in zip(joints, differentiated_runs(joints, captured), strict=True):
        ids = run.parameter_ids
        found.update(ids[number] for number in joint.inputs_with_gradients & ids.keys())
    return frozenset(found)


def eager_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[EagerCodeBytes, ...]:
    """The bytes that eager code before, during and after each run with a joint graph holds, in the order of the runs.
    Runs without a joint graph count as eager code here.

    The last entry is for the end of the step (`CapturedCall.ending`)."""
    scheduled = set(map(id, differentiated_runs(joints, captured)))
    found: list[EagerCodeBytes] = []
    skipped, ending = EagerCodeBytes(), captured.ending
    for run in captured.runs:
        if id(run) in scheduled:
            found.append(replace(run.eager, before=max(run.eager.before, skipped.before)))
            skipped = EagerCodeBytes()
        else:
            skipped |= EagerCodeBytes(max(run.eager.before, run.eager.during))
            later = max(run.eager.before_backward, run.eager.during_backward)
            if found:  # this run's backward comes just before that of the run before it
                found[-1] |= EagerCodeBytes(before_backward=later)
            else:
                ending |= EagerCodeBytes(before=later)
    return (*found, ending | EagerCodeBytes(before_backward=skipped.before))


def passed_of_runs(joints: Sequence[JointGraph], captured: CapturedCall) -> tuple[Passed, ...]:
    """The values that each run with a joint graph exchanges with other code (`RegionRun.passed`). Where some run has no
    joint graph, the runs are renumbered, and references to runs by number are dropped."""
    passed = tuple(run.passed for run in differentiated_runs(joints, captured))
    return passed if len(passed) == len(captured.runs) else tuple(one.without_runs() for one in passed)


def accumulating(
    joints: Sequence[JointGraph], captured: CapturedCall, hooked: Collection[int] = ()
) -> tuple[JointGraph, ...]:
    """The joint graphs of a call's runs, each with the parameters whose gradients that run may add to `.grad` itself.

    Other gradients are returned to autograd: those of parameters with hooks that wait for them (`hooked` has their
    `id`s), and those of tensor subclasses (`RecordedRegion.wrapped`), which AOTAutograd makes from the graph's
    results."""
    differentiated = {id(joint.trace.region) for joint in joints}
    runs = zip(captured.runs, captured.parameters_of_runs(hooked), strict=True)
    numbers = [parameters - run.region.wrapped for run, parameters in runs if id(run.region) in differentiated]
    return tuple(
        joint.accumulating(frozenset(map(joint.place_of, parameters)))
        for joint, parameters in zip(joints, numbers, strict=True)
    )

"""A captured region as its canonical joint graph, traced by AOTAutograd or inductor, with facts about its inputs and
results; and facts of all joint graphs of a call."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.captured_call import CapturedCall, EagerCodeBytes, Passed, RegionRun
from memopt.capture.data_sizes import DataSizes
from memopt.capture.operators import DecideJoint, Operators, run_joint_passes
from memopt.capture.region import RecordedRegion
from memopt.capture.stamp import trace_blocks_once
from memopt.compat.host import device_among
from memopt.compat.inductor import compile_by_inductor, draw_seeds_at_once, seeds_apart
from memopt.compat.joint_trace import AotTrace, InputUse, JointGraphTraced, noting_input_use, trace_region
from memopt.compat.operators import without_autocast
from memopt.device.storages import find_storages, fused_away, is_generated
from memopt.errors import CaptureError
from passes import (
    CANONICAL,
    FreeFirst,
    Pass,
    PassError,
    Pipeline,
    copy_graph_module,
    find_decisions,
    find_reuses,
    format_graph,
    is_random,
)
from passes.compat import replaced_all
from passes.graphs.edit import on_stored_values, place_calls, refresh
from passes.graphs.node_facts import backward_nodes, graph_results, is_tangent, tensors


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of a region as one ATen graph. Its inputs are `primals_*` (inputs of the region) and
    `tangents_*` (gradients of outputs). Its results are the outputs, `forward_outputs` of them, then the gradients of
    inputs."""

    module: fx.GraphModule = field(repr=False)
    forward_outputs: int
    parameter_inputs: frozenset[int] = frozenset()
    """The numbers of the `primals_*` that are parameters whose gradient only this region produces and no hook reads."""
    operators: Operators | None = field(default=None, repr=False, compare=False)
    """The operator graph that this graph was traced from, before and after each pass; None where there was none."""
    passes: Operators | None = field(default=None, repr=False, compare=False)
    """The joint graph before and after each pass that was decided for it; None where there was none."""
    fused: bool = False
    """Whether its backend fuses elementwise operators with the operators that read their results."""
    reuses: tuple[tuple[str, str], ...] = ()
    """The backward calls whose result overwrites an operand that the backward itself makes, each with that operand. The
    backward runs each of them once, in this order, so that the operand is dead by then in every schedule."""
    released: frozenset[int] = frozenset()
    """The positions of the forward's results that its caller holds to the end of the forward only."""
    trace: Any = field(default=None, repr=False, compare=False)
    """The `RegionTrace` from which its forward and backward are compiled; None for a graph that is only planned."""
    differentiated: bool = True
    """Whether there is a backward. Without one, `module` is the region's forward and nothing is planned."""
    places: tuple[int, ...] = ()
    """By the number of each input of the region, the number of the `primals_*` that stands for it; empty where these
    are equal. A sharded parameter is several inputs here: its shard, and the mesh that it is spread over."""
    gradient_places: tuple[int, ...] = ()
    """By the number of each input of the region, the position of its gradient among the gradients; empty where `places`
    is."""

    @cached_property
    def receivers(self) -> dict[int, int]:
        """For each gradient, by its position among the gradients, the number of the `primals_*` that it belongs to."""
        if self.places:
            return dict(zip(self.gradient_places, self.places, strict=True))
        results = graph_results(self.module.graph)
        return {number: number for number in range(len(results) - self.forward_outputs)}

    def place_of(self, number: int) -> int:
        """The number of the `primals_*` that input `number` of the region has become."""
        return self.places[number] if self.places else number

    @property
    def inputs_with_gradients(self) -> frozenset[int]:
        """The numbers of the region's inputs that get a gradient from this graph."""
        gradients = graph_results(self.module.graph)[self.forward_outputs :]
        places = self.gradient_places or range(len(gradients))
        return frozenset(number for number, place in enumerate(places) if _is_gradient(gradients[place]))

    @property
    def overwritten(self) -> frozenset[int]:
        """The numbers of the `primals_*` whose values change during the forward, or were observed to be changed by the
        caller between a forward and its backward."""
        if self.trace is None:
            return frozenset()
        return frozenset(map(self.place_of, self.trace.inputs.overwritten | (self.trace.region.changed or frozenset())))

    @cached_property
    def statistics(self) -> frozenset[int]:
        """The numbers of the region's inputs to which a batch normalisation writes its statistics. Eager kernels write
        them without raising the tensors' version (`Tensor._version`), and the backward of training mode does not read
        them."""
        graph = self.module.graph
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        written = {node.args[0] for node in copies if _is_of_batch_norm(node.args[1])}
        primals = graph.find_nodes(op="placeholder")
        places = self.places or range(len(primals))
        return frozenset(number for number, place in enumerate(places) if primals[place] in written)

    @cached_property
    def inputs_without_gradients(self) -> frozenset[int]:
        """The numbers of the region's inputs that require gradients but get none, because the region reads them
        without autograd."""
        if self.trace is None or not self.differentiated:
            return frozenset()
        return self.trace.inputs.only_read - self.inputs_with_gradients

    @property
    def frozen_ids(self) -> Mapping[int, int]:
        """For each input that is a frozen parameter, by number, the `id` of the model's parameter."""
        frozen: Mapping[int, int] = {} if self.trace is None else self.trace.region.frozen_ids
        return frozen

    def accumulating(self, parameter_inputs: frozenset[int]) -> JointGraph:
        """The same graph, where only the gradients of `parameter_inputs` may be added to `.grad` in place."""
        return self if parameter_inputs == self.parameter_inputs else replace(self, parameter_inputs=parameter_inputs)

    @classmethod
    def of(
        cls,
        traced: fx.GraphModule,
        forward_outputs: int,
        parameter_inputs: frozenset[int],
        operators: Operators | None = None,
        decide: DecideJoint | None = None,
        *,
        fused: bool = False,
        reinplace: bool = False,
        released: frozenset[int] = frozenset(),
    ) -> JointGraph:
        """The joint graph that AOTAutograd gives to a partitioner, in canonical form (`passes.canonicalize`), after the
        passes that `decide` returns.

        With `reinplace`, results of the backward overwrite operands that nothing reads later, unless the graph is
        `fused`: a fusing backend reuses memory itself. The other arguments become the fields of the same names. Raises
        `CaptureError` where a node lacks metadata that planning needs, and `PassError` where a pass fails."""
        module, passed = _canonical(traced), None
        last: tuple[Pass, ...] = (FreeFirst(),) if reinplace and not fused else ()
        if decide is not None:
            passed = run_joint_passes(
                module, decide(module, forward_outputs, operators.exact if operators else frozenset())
            )
            module, last = passed.stages[-1], (*CANONICAL.passes, *last)
        module = Pipeline(last)(module)
        reuses = find_reuses(module, backward_nodes(module.graph)) if reinplace and not fused else ()
        return cls(module, forward_outputs, parameter_inputs, operators, passed, fused, reuses, released)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the graph's text: equal for captures of one region with equal shapes and dtypes."""
        return hashlib.sha256(format_graph(self.module.graph).encode()).hexdigest()[:16]

    @cached_property
    def fused_away(self) -> frozenset[fx.Node]:
        """The nodes whose values take no memory, because each kernel that reads one computes it itself."""
        return fused_away(self.module.graph, self.decisions) if self.fused else frozenset()

    @cached_property
    def decisions(self) -> frozenset[fx.Node]:
        """The forward's nodes that make a discrete choice: indices, masks and roundings computed from values that a
        second run may round otherwise (`passes/graphs/decisions.py`)."""
        return find_decisions(self.module.graph)

    @property
    def held_nodes(self) -> list[fx.Node]:
        """The nodes whose values take memory: those not in `fused_away`."""
        return [node for node in self.module.graph.nodes if node not in self.fused_away]

    @cached_property
    def generated(self) -> frozenset[fx.Node]:
        """The nodes that run in kernels generated by the backend rather than in ATen's."""
        return frozenset(node for node in self.held_nodes if is_generated(node)) if self.fused else frozenset()

    @cached_property
    def parameter_gradients(self) -> dict[int, int]:
        """For each parameter gradient that may be added to `.grad` as soon as it is computed, by its position among the
        results, the number of its `primals_*`. No node of the graph reads such a gradient, and it is returned once."""
        results = graph_results(self.module.graph)
        times = Counter(result for result in results if isinstance(result, fx.Node))
        return {
            self.forward_outputs + position: number
            for position, result in enumerate(results[self.forward_outputs :])
            if (number := self.receivers.get(position, -1)) in self.parameter_inputs
            and isinstance(result, fx.Node)
            and result.op != "placeholder"
            and len(result.users) == times[result] == 1
        }

    @cached_property
    def tangents(self) -> int:
        """The number of outputs whose gradients the backward takes."""
        return sum(map(is_tangent, self.module.graph.nodes))

    @cached_property
    def partial_gradients(self) -> dict[int, frozenset[int]]:
        """The gradients of inputs that some `tangents_*` affect and others do not: a dict from the position of each
        among the gradients to the numbers of the `tangents_*` that affect it. A backward from other outputs alone does
        not compute it."""
        if self.tangents < 2:
            return {}
        sources: dict[fx.Node, frozenset[int]] = {}
        for node in self.module.graph.nodes:
            if is_tangent(node):
                sources[node] = frozenset((len(sources),))
        tangents = frozenset().union(*sources.values())
        for node in self.module.graph.nodes:
            if node not in sources:
                read = (sources.get(source, frozenset()) for source in node.all_input_nodes)
                sources[node] = frozenset().union(*read)
        gradients = enumerate(graph_results(self.module.graph)[self.forward_outputs :])
        found = {at: sources[node] for at, node in gradients if isinstance(node, fx.Node)}
        return {at: some for at, some in found.items() if some and some != tangents}

    @cached_property
    def own_gradients(self) -> frozenset[int]:
        """The positions among the results of those `parameter_gradients` that have a storage of their own, which the
        backward makes and no other result shares. Empty where kernels are `fused`, since these reuse memory."""
        if self.fused:
            return frozenset()
        storages = find_storages(self.module.graph, reuses=self.reuses)
        results = graph_results(self.module.graph)
        backward = backward_nodes(self.module.graph)
        nodes = (result for result in results if isinstance(result, fx.Node))
        users = Counter(block for node in nodes for block in storages.of.get(node, ()))
        own: set[int] = set()
        for position in self.parameter_gradients:
            blocks = storages.of.get(results[position], ())
            if len(blocks) != 1 or users[blocks[0]] != 1:
                continue
            maker = storages.blocks[blocks[0]].maker
            whole = storages.bytes[blocks[0]] == results[position].meta["val"].nbytes
            if whole and maker in backward and maker.op != "placeholder":
                own.add(position)
        return frozenset(own)

    @cached_property
    def ends_before_loss(self) -> bool:
        """Whether the loss is computed outside of the region: its backward then gets a gradient that is no scalar."""
        return any(is_tangent(node) and node.meta["val"].dim() > 0 for node in self.module.graph.nodes)

    @cached_property
    def has_batch_statistics(self) -> bool:
        """Whether the region normalises with statistics over the samples of its batch, as batch normalisation does."""
        calls = (node for node in self.module.graph.nodes if node.op == "call_function")
        return any(_normalises_batch(str(node.target), node.args) for node in calls)

    @cached_property
    def tensor_positions(self) -> dict[int, int]:
        """For each `primals_*` that is a tensor, by its number: the position of the region's input among those inputs
        that are tensors, the only ones that autograd counts."""
        primals = self.module.graph.find_nodes(op="placeholder")
        numbers = self.places or range(len(primals))
        tensors = [number for number in numbers if isinstance(primals[number].meta["val"], torch.Tensor)]
        return {number: position for position, number in enumerate(tensors)}


def _is_gradient(result: object) -> bool:
    return isinstance(result, fx.Node) and isinstance(result.meta.get("val"), torch.Tensor)


def _canonical(traced: fx.GraphModule) -> fx.GraphModule:
    """The canonical form of a graph as torch traced it, each call with its module and line. Raises `CaptureError` where
    a node lacks metadata that planning needs."""
    place_calls(traced.graph)
    try:
        return CANONICAL(traced)
    except PassError as error:
        name = f"{error.node} in " if error.node else ""
        raise CaptureError(
            f"{name}the graph that torch traced cannot be planned: {error.problem}; exclude the code "
            "that makes this part of the graph from the capture with torch.compiler.disable"
        ) from error


def _is_of_batch_norm(value: object) -> bool:
    """Whether a value is one of the results of a batch normalisation in training mode."""
    if not (isinstance(value, fx.Node) and value.target is operator.getitem):
        return False
    made = value.args[0]
    return isinstance(made, fx.Node) and _normalises_batch(str(made.target), made.args)


def _normalises_batch(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operator is a forward batch normalisation in training mode."""
    forward = "batch_norm" in name and "backward" not in name and "no_training" not in name
    # (input, weight, bias, running_mean, running_var, training, …); without running statistics (input, …, training, …)
    return forward and True in args


_Trace = TypeVar("_Trace", "AotTrace", "_InductorTrace")


@dataclass(frozen=True)
class _InductorTrace:
    """A region as inductor has traced it, before its joint graph is cut into forward and backward."""

    module: fx.GraphModule | None
    """The joint graph after inductor's decompositions and passes; None for a region without gradients."""
    forward_outputs: int
    """The number of outputs of the forward, which come first among the outputs of the joint graph."""
    inputs: InputUse
    """The inputs that the region writes to, and those it only reads."""


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

    # A copy, because inductor changes the module that it compiles.
    with suppress(JointGraphTraced), replaced_all([noting_input_use(used), seeds_apart()]):
        # Of a region without gradients inductor compiles the forward, which is returned as it is.
        given = copy_graph_module(module), list(inputs), take_joint, lambda compiled, *_: compiled
        compile_by_inductor(*given, lambda: "no plan")
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
    """The inputs that the region writes to, and those it only reads."""

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
    """The result of `trace` for a region's module and inputs, each kind of block traced once."""
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

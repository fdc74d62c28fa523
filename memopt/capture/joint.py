"""A captured region as its canonical joint graph, with facts about its inputs and results."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from memopt.capture.operators import DecideJoint, Operators, run_joint_passes
from memopt.device.storages import find_storages, fused_away, is_generated
from memopt.errors import CaptureError
from passes import (
    CANONICAL,
    FreeFirst,
    Pass,
    PassError,
    Pipeline,
    find_decisions,
    find_reuses,
    format_graph,
)
from passes.graphs.edit import place_calls
from passes.graphs.node_facts import backward_nodes, graph_results, is_tangent


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

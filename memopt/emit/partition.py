"""Partitions a joint graph by its schedule into the forward and backward modules that AOTAutograd runs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from memopt.capture.joint import JointGraph
from memopt.compat.operators import OpOverload
from memopt.compat.tensors import storage_key
from memopt.compat.tracing import extract_halves
from memopt.device.storages import find_storages
from memopt.device.workspace import COLLECTIVES
from memopt.emit.gradients import Accumulation, accumulate_in_place, is_reached
from memopt.planning.refit import Footprint
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph
from memopt.price.priced_graph import MemoryUses
from passes import Reinplace
from passes.apply_schedule import BACKWARD
from passes.graphs.node_facts import graph_results, is_tangent

Cut: TypeAlias = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""Returns the forward and the backward module of a region; ignores its arguments, those of a partitioner of torch."""


@dataclass(frozen=True, eq=False)
class Emitted:
    """A region as a function of its inputs, with the bytes that its compiled code holds."""

    run: Callable[..., Any] = field(repr=False)
    footprint: Footprint | None = None
    """The bytes that its compiled forward and backward hold; None where the plan's own figures are used."""
    exchanges: int = 0
    """A digest of the collectives that its forward and backward run: equal on two ranks that run the same ones in the
    same order, 0 where there are none."""


def partition(
    joint: JointGraph, schedule: RegionSchedule, accumulation: Accumulation | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward modules of a region. Results are written over operands as `JointGraph.reuses` says. With
    `accumulation`, gradients are added to `.grad` in place, and parameters are stepped as the schedule says."""
    scheduled = scheduled_graph(joint, schedule)
    saved, symbols, objects = _crossing(scheduled.graph, joint.forward_outputs)
    forward, backward = extract_halves(scheduled, saved, symbols, objects, joint.forward_outputs)
    steps = nodes_before_steps(joint, scheduled, backward, schedule.steps)
    if joint.reuses:
        backward = Reinplace(joint.reuses)(backward)
    if accumulation is not None:
        first, tensors = joint.forward_outputs, joint.tensor_positions
        inputs = {position - first: tensors[number] for position, number in joint.parameter_gradients.items()}
        own = {position - first for position in joint.own_gradients} if accumulation.exchange is not None else ()
        reached = {
            position: partial(is_reached, tangents, joint.tangents)
            for position, tangents in joint.partial_gradients.items()
        }
        accumulate_in_place(backward, inputs, accumulation, steps, own, reached)
    return forward, backward


def _crossing(graph: fx.Graph, forward_outputs: int) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The forward's values that the backward reads or returns, in three lists: tensors, including those offloaded to
    the host, sizes, and other objects."""
    returned = set(graph_results(graph)[forward_outputs:])
    tensors: list[fx.Node] = []
    sizes: list[fx.Node] = []
    objects: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or is_tangent(node) or _is_backward(node):
            continue
        if node in returned or any(user.op != "output" and _is_backward(user) for user in node.users):
            value = node.meta["val"]
            kind = tensors if isinstance(value, torch.Tensor) else sizes if isinstance(value, _NUMBERS) else objects
            kind.append(node)
    return tensors, sizes, objects


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_backward(node: fx.Node) -> bool:
    """Whether the schedule puts a node into the backward."""
    return node.meta.get("partitioner_tag") == BACKWARD


def nodes_before_steps(
    joint: JointGraph, scheduled: fx.GraphModule, backward: fx.GraphModule, numbers: Sequence[int]
) -> dict[int, set[str]]:
    """For each parameter to step, the names of the backward's nodes that must run before the step: the node that makes
    its gradient, and all that read the storage of parameter or gradient through any alias, recomputed nodes included.
    The keys are the positions of the gradients among the backward's results.

    `numbers` are the positions of the parameters to step among the region's inputs. `backward` was extracted from
    `scheduled`, the scheduled graph. The nodes are found anew in `scheduled`, to notice an error of the planner."""
    if not numbers:
        return {}
    named = {node.name: node.target for node in scheduled.graph.nodes}
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    assert all(named.get(node.name) == node.target for node in calls), (
        "a node of the schedule has another name in the backward"
    )
    uses = MemoryUses(scheduled.graph, find_storages(scheduled.graph))
    found: dict[int, set[str]] = {}
    for position, number in joint.parameter_gradients.items():
        before = uses.before_step(position, number) if number in numbers else None
        if before is not None:
            late = {node.name for node in before if node.meta.get("partitioner_tag") == BACKWARD}
            found[position - joint.forward_outputs] = late
    assert len(found) == len(numbers), "a parameter's step is planned in the backward but must come after it"
    return found


def check_own_memory(inputs: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` where a parameter that is stepped in the backward (at one of the positions `numbers`) shares
    storage with another input of the region: nodes that read that input are not known to read the parameter."""
    if not numbers:
        return
    held = Counter(storage_key(value) for value in inputs if isinstance(value, torch.Tensor))
    for number in numbers:
        assert isinstance(inputs[number], nn.Parameter)
        if held[storage_key(inputs[number])] > 1:
            raise ValueError(
                f"a parameter of shape {tuple(inputs[number].shape)} shares its memory with another tensor that the "
                "model reads, and the plan counts on stepping it within the backward; give the model a copy, or leave "
                "optimizer_in_backward out of allow"
            )


def sharing_memory(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that share their storage with another parameter or a buffer."""
    tensors: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers())
    held = Counter(storage_key(tensor) for tensor in tensors)
    return [parameter for parameter in model.parameters() if held[storage_key(parameter)] > 1]


_BYTES = 7
"""The bytes of a digest, so that it fits into an int64."""


def exchanges_of(*graphs: fx.Graph) -> int:
    """A digest of the collectives (operators and shapes, in order) in graphs that run in this order; 0 for none."""
    nodes = [node for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)]
    calls = [node for node in nodes if node.target.namespace in COLLECTIVES]
    if not calls:
        return 0
    text = repr([(str(node.target), tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) for node in calls])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_BYTES], "big")

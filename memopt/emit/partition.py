"""Partitions a joint graph by its schedule into the forward and backward modules that AOTAutograd runs."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from memopt.capture.joint import JointGraph
from memopt.compat.aot import extract_halves
from memopt.emit.gradients import Accumulation, accumulate_in_place
from memopt.emit.reached import is_reached
from memopt.emit.stepping import nodes_before_steps
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph
from passes import Reinplace
from passes.apply_schedule import BACKWARD
from passes.graphs.node_facts import is_tangent


def partition(
    joint: JointGraph, schedule: RegionSchedule, accumulation: Accumulation | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward modules of a region, with operands overwritten where the graph says so
    (`JointGraph.reuses`). With `accumulation`, gradients are added to `.grad` in place, and parameters are stepped
    where the schedule says so."""
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
    """The forward's values that the backward reads or returns: tensors, including those offloaded to the host, sizes,
    and other objects."""
    results = graph.output_node()
    returned = set(results.args[0][forward_outputs:])  # type: ignore[index,arg-type]
    tensors: list[fx.Node] = []
    sizes: list[fx.Node] = []
    objects: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or is_tangent(node) or _is_backward(node):
            continue
        if node in returned or any(user is not results and _is_backward(user) for user in node.users):
            value = node.meta["val"]
            kind = tensors if isinstance(value, torch.Tensor) else sizes if isinstance(value, _NUMBERS) else objects
            kind.append(node)
    return tensors, sizes, objects


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_backward(node: fx.Node) -> bool:
    """Whether the schedule puts a node into the backward."""
    return node.meta.get("partitioner_tag") == BACKWARD

"""The positions at which a scheduled region's parameters are stepped: after the last node that reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.joint import JointGraph
from memopt.compat.storages import storage_key
from memopt.device.storages import find_storages
from memopt.price.priced_graph import MemoryUses
from passes.apply_schedule import BACKWARD


def nodes_before_steps(
    joint: JointGraph, scheduled: fx.GraphModule, backward: fx.GraphModule, numbers: Sequence[int]
) -> dict[int, set[str]]:
    """Position of a gradient among the backward's results → names of the backward's nodes that read the storage of the
    parameter or of the gradient through any alias, recomputed nodes included.

    `numbers` are those of the inputs to step. `backward` is the half extracted from the scheduled graph. The names come
    from the scheduled graph alone, so that an error of the planner cannot go unnoticed.
    """
    if not numbers:
        return {}
    named = {node.name: node.target for node in scheduled.graph.nodes}
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    assert all(named.get(node.name) == node.target for node in calls), "a node has another name in the backward"
    uses = MemoryUses(scheduled.graph, find_storages(scheduled.graph))
    found: dict[int, set[str]] = {}
    for position, number in joint.parameter_gradients.items():
        before = uses.before_step(position, number) if number in numbers else None
        if before is not None:
            late = {node.name for node in before if node.meta.get("partitioner_tag") == BACKWARD}
            found[position - joint.forward_outputs] = late
    assert len(found) == len(numbers), "a plan steps a parameter that its schedule cannot step"
    return found


def check_own_memory(inputs: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` where a parameter that is stepped in the backward shares storage with another input of the
    region: nodes that read that input are not known to read the parameter."""
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

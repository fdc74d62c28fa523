"""Decides which fp32 activations are saved for the backward in bf16."""

from __future__ import annotations

import torch
from torch import fx

from memopt.capture.operators import traced_from
from memopt.device.storages import storage_bytes
from passes import NarrowSaved, Pipeline, SumWide
from passes.graphs.aliases import storages
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import is_cast, is_view, op_name

# They read operands of products, or of smooth derivatives: a relative error of 2^-9 there is one of the gradients, no
# more than their own rounding. `_log_softmax_backward_data` is not here: it takes the exponential.
_TOLERANT = frozenset(
    {
        "native_layer_norm_backward",
        "native_group_norm_backward",
        "native_batch_norm_backward",
        "_fused_rms_norm_backward",
        "_softmax_backward_data",
        "gelu_backward",
        "mul",
        "pow",
        "sigmoid_backward",
        "silu_backward",
        "tanh_backward",
        "threshold_backward",
    }
)
# Smaller values are not worth two casts.
LEAST_BYTES = 64 * 1024


def narrowing(module: fx.GraphModule, forward_outputs: int, exact: frozenset[str] = frozenset()) -> Pipeline:
    """Returns the passes for the joint graph of a bf16 region that save activations in 16 bits.

    `exact` holds the names of the operator graph's nodes whose dtype the author or the user has set.
    """
    return Pipeline((SumWide(), NarrowSaved(narrowed(module.graph, forward_outputs, exact), torch.bfloat16)))


def narrowed(graph: fx.Graph, forward_outputs: int, exact: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Returns the names of the fp32 values of the forward that only tolerant operators of the backward read.

    Left alone are values that are held anyway, as inputs or outputs, values that the backward reads through several
    views, widened 16-bit values, and all that the author or the user wants in fp32.
    """
    backward = backward_nodes(graph)
    values = sole_values(graph, forward_outputs)
    return tuple(node.name for node in values if worth_narrowing(node) and tolerated(node, backward, exact))


def sole_values(graph: fx.Graph, forward_outputs: int) -> tuple[fx.Node, ...]:
    """Returns the values that the forward computes and the backward reads, without inputs and outputs.

    Storages of which the backward reads more than one view are left out.
    """
    backward = backward_nodes(graph)
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    kept = [
        *graph.find_nodes(op="placeholder"),
        *(result for result in results[:forward_outputs] if isinstance(result, fx.Node)),
    ]
    stays = {storage for node in kept for storage in storages(node)}
    seen: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in backward and node.op == "call_function" and any(user in backward for user in node.users):
            for storage in storages(node):
                seen.setdefault(storage, []).append(node)
    return tuple(nodes[0] for storage, nodes in seen.items() if storage not in stays and len(nodes) == 1)


def worth_narrowing(node: fx.Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or is_cast(node):
        return False
    if value.dim() == 0 or value.shape[-1] == 1:  # a statistic of each row: few bytes, and every element depends on it
        return False
    return storage_bytes(value) >= LEAST_BYTES


def tolerated(value: fx.Node, backward: frozenset[fx.Node], exact: frozenset[str] = frozenset()) -> bool:
    """Returns whether all readers of a value in the backward, behind views too, may read it in bf16."""
    if traced_from(value) in exact:
        return False
    for reader in value.users:
        if reader not in backward:
            continue
        name = "" if traced_from(reader) in exact else op_name(reader)
        if is_view(reader):
            if not tolerated(reader, backward, exact):
                return False
        elif name not in _TOLERANT:
            return False
    return True

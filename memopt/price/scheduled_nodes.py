"""Which nodes of a joint graph a schedule names, and which half of the step each belongs to."""

from __future__ import annotations

import operator

from torch import fx

from memopt.compat.operators import OpOverload, schema_of
from memopt.device.storages import is_view
from passes.graphs.aliases import WAIT
from passes.graphs.node_facts import backward_nodes
from passes.ops.offload_ops import TRANSFERS


def split_halves(graph: fx.Graph, fused: frozenset[fx.Node] = frozenset()) -> tuple[list[fx.Node], list[fx.Node]]:
    """The scheduled nodes of the forward and of the backward, each in program order, without `fused` ones."""
    late = backward_nodes(graph)
    scheduled = [node for node in graph.nodes if is_scheduled(node) and node not in fused]
    return [node for node in scheduled if node not in late], [node for node in scheduled if node in late]


def is_scheduled(node: fx.Node) -> bool:
    """Whether a schedule names the node: it makes memory or has effects.

    Views and elements of tuples follow what they read, and copies to and from the host run beside compute.
    """
    if node.op != "call_function" or node.target in TRANSFERS:
        return False
    writes = is_mutation(node) or node.target is WAIT
    return writes or not (is_view(node) or node.target is operator.getitem)


def is_mutation(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable

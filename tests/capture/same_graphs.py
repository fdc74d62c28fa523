"""Compares two joint graphs node by node."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import fx

from memopt.capture.blocks import constant_key
from memopt.compat.tensors import storage_key
from passes.graphs.node_facts import tensors, value_kind

# Numbers that grow from trace to trace, and chains of nodes.
_NOT_COMPARED = {"ac_graph_id", "from_node", "val"}


def differences(one: fx.GraphModule, other: fx.GraphModule) -> Iterator[str]:
    """Differences between two graphs: nodes in order, with names, arguments, values, memory and all that is stored."""
    nodes, others = list(one.graph.nodes), list(other.graph.nodes)
    if len(nodes) != len(others):
        yield f"{len(nodes)} and {len(others)} nodes"
        return
    pair = dict(zip(nodes, others, strict=True))
    made: dict[int, fx.Node] = {}
    made_there: dict[int, fx.Node] = {}
    forward_of, forward_there = _forwards(nodes), _forwards(others)
    for node, there in pair.items():
        found = _facts(node, one, forward_of), _facts(there, other, forward_there)
        for name in found[0].keys() | found[1].keys():
            mine, theirs = (facts.get(name) for facts in found)
            if mine != theirs:
                yield f"{node.name}: {name}: {str(mine)[:200]} and {str(theirs)[:200]}"
        if str(fx.map_arg((node.args, node.kwargs), pair.__getitem__)) != str((there.args, there.kwargs)):
            yield f"{node.name}: arguments: {node.args} and {there.args}"
        for value, other_value in zip(tensors(node.meta.get("val")), tensors(there.meta.get("val")), strict=True):
            maker = made.setdefault(storage_key(value), node)
            if pair[maker] is not made_there.setdefault(storage_key(other_value), there):
                there_maker = made_there[storage_key(other_value)]
                yield f"{node.name} lies in the memory of {maker.name} and of {there_maker.name}"


def _forwards(nodes: list[fx.Node]) -> dict[int, str]:
    """By autograd's number of a node (`seq_nr`) the operator of the forward that has it. A call without a backward has
    that of the next one that has."""
    calls = (node for node in nodes if node.op == "call_function" and "seq_nr" in node.meta)
    return {node.meta["seq_nr"]: node.name for node in calls if node.meta.get("partitioner_tag") != "is_backward"}


def _facts(node: fx.Node, module: fx.GraphModule, forward_of: dict[int, str]) -> dict[str, Any]:
    value = node.meta.get("val")
    facts = {
        "name": node.name,
        "target": str(node.target),
        "value": value_kind(value),
        "bytes": [str(tensor.untyped_storage().nbytes()) for tensor in tensors(value)],
        "constants": [getattr(tensor, "constant", None) is None for tensor in tensors(value)],
    }
    if node.op == "get_attr":
        facts["constant"] = constant_key(attrgetter(str(node.target))(module))
    for name, stored in node.meta.items():
        if name == "seq_nr":
            if node.meta.get("partitioner_tag") == "is_backward":
                facts[name] = forward_of.get(stored, "")
        elif name.endswith("nn_module_stack"):
            facts[name] = [path for path, _ in (stored or {}).values()]
        elif name not in _NOT_COMPARED:
            facts[name] = str(stored)
    return facts

"""The values that two graphs of a region have in common, which was traced once more under other guards or for other
sizes: an order that depends on sizes may put the same operators elsewhere."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import find_storages
from passes import is_pure


@dataclass(frozen=True)
class Value:
    """A node that allocates memory or has effects."""

    name: str
    computation: int
    """A hash of the operators that compute it from the inputs of the graph, without sizes and other numbers."""
    nbytes: int
    """The bytes that it allocates."""


def values_of(joint: JointGraph) -> tuple[Value, ...]:
    """The values of a graph in its order, with the sizes that `upper_bound` takes for its symbols. Raises
    `CaptureError` where a size is not known."""
    graph = joint.module.graph
    made = {info.maker: info.bytes for info in find_storages(graph).infos}
    of_node: dict[fx.Node, int] = {}
    found = []
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            of_node[node] = hash(("input", len(of_node)))
        operands = tuple(of_node[operand] for operand in node.all_input_nodes if operand in of_node)
        if node.op == "call_function" and (node in made or not is_pure(node)):
            of_node[node] = hash((str(node.target), operands))
            found.append(Value(node.name, of_node[node], made.get(node, 0)))
        elif node.op == "call_function" and operands:
            of_node[node] = _of_view(node, operands)
    return tuple(found)


def _of_view(node: fx.Node, operands: Sequence[int]) -> int:
    """The computation of a node that allocates nothing: a view, which counts as what it is a view of, or one of several
    results."""
    part: Any = node.args[1] if node.target is operator.getitem else None
    return operands[0] if part is None else hash((operands[0], part))


def names_in(ours: Sequence[Value], planned: Sequence[Value]) -> dict[str, str] | None:
    """Name in `planned` → name in `ours`; None unless they have the same values, none of them larger in `ours`. Of
    several with the same computation, the first is the first."""
    left: defaultdict[int, list[Value]] = defaultdict(list)
    for value in reversed(ours):
        left[value.computation].append(value)
    names = {}
    for value in planned:
        own = left[value.computation].pop() if left[value.computation] else None
        if own is None or own.nbytes > value.nbytes:
            return None
        names[value.name] = own.name
    return names if len(names) == len(ours) else None

"""How much the loss depends on each value: weights of the first-order error, estimated without gradients."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from passes.graphs.op_kinds import follows_input, is_cast, is_pointwise, op_name

_SUMS = frozenset({"add", "add_", "sub", "sub_"})
_JOINS = frozenset({"cat", "concat", "stack", "hstack", "vstack"})


@dataclass(frozen=True)
class Influence:
    """Weights between 0 and 1. Rounding a value to a unit roundoff u moves the gradients by about u·√weight of them."""

    of: Mapping[fx.Node, float]
    """The weight of a value through all its readers."""
    through: Mapping[tuple[fx.Node, fx.Node], float]
    """The weight of a value through one of its readers."""

    def edge(self, value: fx.Node, reader: fx.Node) -> float:
        return self.through.get((value, reader), 0.0)


def differentiated(graph: fx.Graph, parameter_inputs: Collection[int]) -> frozenset[fx.Node]:
    """Returns the floating-point values that depend on a parameter, and so have gradients."""
    found: set[fx.Node] = set()
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if _floats(value) and (number in parameter_inputs or getattr(value, "requires_grad", False)):
            found.add(node)
    for node in graph.nodes:
        depends = any(source in found for source in node.all_input_nodes)
        if node.op == "call_function" and depends and _floats(node.meta.get("val")) and op_name(node) != "detach":
            found.add(node)
    return frozenset(found)


def influence(graph: fx.Graph, differentiated: Collection[fx.Node]) -> Influence:
    """Models `(gradient · rounding)²`, the first-order error (design, section 7), without data.

    Values are assumed to have variance 1, as normalised activations, biases 0, and sums that of their operands
    together: a residual stream grows by 1 with each block. A relative error of a sum's operand becomes one of the sum
    in proportion to the operand's share; other operators pass it on unchanged. The loss has weight 1, and no value has
    more. Roundings are independent, so that weights add.
    """
    sizes = _variances(graph, differentiated)
    of: dict[fx.Node, float] = {}
    through: dict[tuple[fx.Node, fx.Node], float] = {}
    returned = [node for node in graph.output_node().all_input_nodes if node in differentiated]
    losses = [node for node in returned if _is_scalar(node)]
    of.update(dict.fromkeys(losses or returned, 1.0))
    for reader in reversed(graph.nodes):
        weight = of.get(reader, 0.0)
        operands = [source for source in reader.all_input_nodes if source in differentiated]
        if not weight or reader.op != "call_function":
            continue
        total = sum(sizes[operand] for operand in operands)
        for operand in operands:
            share = sizes[operand] / total if op_name(reader) in _SUMS | _JOINS and total else 1.0
            through[operand, reader] = weight * share
            of[operand] = min(1.0, of.get(operand, 0.0) + weight * share)
    return Influence(of, through)


def _variances(graph: fx.Graph, differentiated: Collection[fx.Node]) -> dict[fx.Node, float]:
    sizes: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node not in differentiated:
            continue
        operands = [sizes[source] for source in node.all_input_nodes if source in differentiated]
        if node.op == "placeholder":
            sizes[node] = 1.0 if node.meta["val"].dim() > 1 else 0.0
        elif op_name(node) in _SUMS:
            sizes[node] = sum(operands)
        elif op_name(node) in _JOINS:
            sizes[node] = sum(operands) / len(operands)
        elif len(operands) == 1 and _keeps_size(node):
            sizes[node] = operands[0]
        else:
            sizes[node] = 1.0
    return sizes


def _keeps_size(node: fx.Node) -> bool:
    moves = node.target is operator.getitem or is_cast(node) or follows_input(node)
    return moves or (is_pointwise(node) and op_name(node) in ("dropout", "mul", "div", "relu", "relu_", "gelu", "silu"))


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _floats(value: object) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(operand, torch.Tensor) and operand.is_floating_point() for operand in values)

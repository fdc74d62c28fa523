"""How much of the loss rests on each value: the weights of the first-order error where no gradients are at hand."""

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
    """By value, through all that reads it."""
    through: Mapping[tuple[fx.Node, fx.Node], float]
    """By value and the one call that reads it."""

    def edge(self, value: fx.Node, reader: fx.Node) -> float:
        return self.through.get((value, reader), 0.0)


def differentiated(graph: fx.Graph, parameter_inputs: Collection[int]) -> frozenset[fx.Node]:
    """The floating-point values that depend on a parameter: those that gradients come to."""
    found: set[fx.Node] = set()
    for number, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if _floats(value) and (number in parameter_inputs or getattr(value, "requires_grad", False)):
            found.add(node)
    for node in graph.nodes:
        depends = any(each in found for each in node.all_input_nodes)
        if node.op == "call_function" and depends and _floats(node.meta.get("val")) and op_name(node) != "detach":
            found.add(node)
    return frozenset(found)


def influence(graph: fx.Graph, differentiated: Collection[fx.Node]) -> Influence:
    """A model of `(gradient · rounding)²`, the first-order error (design, section 7), without data.

    All values are taken to be as large as a normalised activation (variance 1), biases as 0, and what sums make as
    large as the sum of their operands: a residual stream grows by 1 with each block. A relative error of a sum's
    operand is then one of the sum by the operand's share of it; through a product, a norm or any other operator it
    passes whole. The loss weighs 1; no value weighs more. Roundings are independent, so that weights add.
    """
    sizes = _variances(graph, differentiated)
    of: dict[fx.Node, float] = {}
    through: dict[tuple[fx.Node, fx.Node], float] = {}
    returned = [node for node in graph.output_node().all_input_nodes if node in differentiated]
    losses = [node for node in returned if _is_scalar(node)]
    of.update(dict.fromkeys(losses or returned, 1.0))
    for reader in reversed(graph.nodes):
        weight = of.get(reader, 0.0)
        operands = [each for each in reader.all_input_nodes if each in differentiated]
        if not weight or reader.op != "call_function":
            continue
        total = sum(sizes[each] for each in operands)
        for each in operands:
            share = sizes[each] / total if op_name(reader) in _SUMS | _JOINS and total else 1.0
            through[each, reader] = weight * share
            of[each] = min(1.0, of.get(each, 0.0) + weight * share)
    return Influence(of, through)


def _variances(graph: fx.Graph, differentiated: Collection[fx.Node]) -> dict[fx.Node, float]:
    sizes: dict[fx.Node, float] = {}
    for node in graph.nodes:
        if node not in differentiated:
            continue
        operands = [sizes[each] for each in node.all_input_nodes if each in differentiated]
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
    return any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in values)

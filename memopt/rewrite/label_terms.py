"""The cost of choosing fp32 (label 0) or 16 bits (label 1), as terms of pairs of labels.

The error of a rounding is weighted by how much the loss depends on the value, which is estimated without gradients.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from memopt.solver.arrays import Flags
from memopt.solver.label_cut import ONE, ZERO, LabelProblem
from passes.graphs.node_facts import has_floats
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
        if has_floats(node) and (number in parameter_inputs or getattr(value, "requires_grad", False)):
            found.add(node)
    for node in graph.nodes:
        depends = any(source in found for source in node.all_input_nodes)
        if node.op == "call_function" and depends and has_floats(node) and op_name(node) != "detach":
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
    losses = [node for node in returned if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 0]
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


class Amounts(NamedTuple):
    """Seconds of the step, bytes saved for the backward, and error in squared unit roundoffs."""

    seconds: float = 0.0
    nbytes: float = 0.0
    error: float = 0.0

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(one - two for one, two in zip(self, other, strict=True)))


@dataclass
class LabelTerms:
    """Terms over numbered labels. A cast or a saved copy that several readers share has a label that they demand."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    amounts: list[Amounts] = field(default_factory=list)
    labels: int = 2
    _demands: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By shared label the pairs of label and value that demand it."""
    _demanded: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _touching: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def label(self) -> int:
        self.labels += 1
        return self.labels - 1

    def add(self, zero: int, one: int, amounts: Amounts) -> None:
        """Adds the cost of `zero` having label 0 while `one` has label 1."""
        if zero in (one, ONE) or one == ZERO or amounts == Amounts():
            return
        for label in {zero, one}:
            self._touching[label].append(len(self.pairs))
        self.pairs.append((zero, one))
        self.amounts.append(amounts)

    def shared(self, low: bool, demanding: Iterable[int], source: int, amounts: Amounts) -> None:
        """Adds a cost that is paid once if any of `demanding` has label 1 (`low`; else label 0).

        It is paid where `source` has the other label; with the source ZERO (or ONE, if not `low`) always.
        """
        thing = self.label()
        for label in sorted(set(demanding)):
            self._demands[thing].append((label, int(low)))
            self._demanded[label].append(thing)
        self.add(*((source, thing) if low else (thing, source)), amounts)

    def problem(self, byte_price: float) -> LabelProblem:
        """Returns the problem with costs in seconds, `byte_price` of them for a byte, and errors as tolls."""
        demands = [
            (thing, label) if low else (label, thing) for thing, all_ in self._demands.items() for label, low in all_
        ]
        costs = [amount.seconds + byte_price * amount.nbytes for amount in self.amounts] + [math.inf] * len(demands)
        tolls = [amount.error for amount in self.amounts] + [0.0] * len(demands)
        pairs = np.array([*self.pairs, *demands], np.int64).reshape(-1, 2)
        return LabelProblem(self.labels, pairs[:, 0], pairs[:, 1], np.array(costs), np.array(tolls))

    def complete(self, chosen: dict[int, bool]) -> Flags:
        """Returns all labels for given ones: a shared label is set exactly where it is demanded."""
        labels = np.zeros(self.labels, np.bool_)
        labels[ONE] = True
        for label, low in chosen.items():
            labels[label] = low
        for thing in self._demands:
            labels[thing] = self._state(thing, labels)
        return labels

    def total(self, labels: Flags) -> Amounts:
        return self._sum(range(len(self.pairs)), labels)

    def flipping(self, label: int, labels: Flags) -> Amounts:
        """Returns the additional amounts of giving one label the other value."""
        things = self._demanded[label]
        near = sorted({pair for part in (label, *things) for pair in self._touching[part]})
        other = labels.copy()
        other[label] = not labels[label]
        for thing in things:
            other[thing] = self._state(thing, other)
        return self._sum(near, other) - self._sum(near, labels)

    def _state(self, thing: int, labels: Flags) -> bool:
        demands = self._demands[thing]
        low = bool(demands[0][1])
        return low if any(bool(labels[label]) == low for label, _ in demands) else not low

    def _sum(self, pairs: Iterable[int], labels: Flags) -> Amounts:
        paid = [self.amounts[pair] for pair in pairs if not labels[self.pairs[pair][0]] and labels[self.pairs[pair][1]]]
        return Amounts(*(math.fsum(column) for column in zip(*paid, strict=True))) if paid else Amounts()

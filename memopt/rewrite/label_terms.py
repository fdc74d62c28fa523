"""The cost of choosing fp32 (label 0) or 16 bits (label 1) for the calls of a graph, as a sum over pairs of labels:
the cost of a pair counts if its first label is 0 and its second is 1."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from memopt.device.storages import storage_bytes
from memopt.device.time_model import op_seconds
from memopt.rewrite.op_prices import OpPrice, OpPrices, Saved, operands
from memopt.rewrite.policy import PrecisionPlan
from memopt.solver.arrays import Flags
from memopt.solver.max_flow import ONE, ZERO, LabelProblem
from passes.graphs.node_facts import has_floats, tensors
from passes.graphs.op_kinds import (
    CAST_FIRST_ONLY,
    FP32_SET_DTYPE,
    follows_input,
    is_cast,
    is_new,
    is_view,
    mutated_arguments,
    op_name,
    promotes,
)


class Amounts(NamedTuple):
    """What a choice of dtypes costs, for one call or copy or as the sum over several: seconds of the step, bytes saved
    for the backward, and the error in squared unit roundoffs."""

    seconds: float = 0.0
    nbytes: float = 0.0
    error: float = 0.0

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(*(one - two for one, two in zip(self, other, strict=True)))


@dataclass
class _LabelTerms:
    """Pairs of numbered labels with their amounts. A cast or a saved copy that several readers share has a label of its
    own, which is that of the copy's dtype where a reader demands the copy, else the other one."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    amounts: list[Amounts] = field(default_factory=list)
    labels: int = 2
    _demands: dict[int, tuple[bool, list[int]]] = field(default_factory=dict)
    """By shared label: which value of the labels that share it demands it, and these labels."""
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
        """Adds the cost of one copy that all readers of a value share: in 16 bits if `low`, else in fp32.

        It is paid once, if any of the labels `demanding` is that of the copy while the value's, `source`, is the other.
        A `source` of ZERO (or of ONE, if not `low`) stands for a value that needs the copy whatever its own label."""
        thing = self.label()
        self._demands[thing] = low, sorted(set(demanding))
        for label in set(demanding):
            self._demanded[label].append(thing)
        self.add(*((source, thing) if low else (thing, source)), amounts)

    def problem(self, byte_price: float) -> LabelProblem:
        """Returns the problem for a minimum cut. Costs are in seconds, a saved byte counts as `byte_price` seconds, and
        errors are tolls."""
        shared = self._demands.items()
        demands = [(one, label) if low else (label, one) for one, (low, labels) in shared for label in labels]
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
        """Returns by how much the sums grow if one label gets the other value."""
        other = labels.copy()
        other[label] = not labels[label]
        for thing in self._demanded[label]:
            other[thing] = self._state(thing, other)
        near = sorted({pair for part in (label, *self._demanded[label]) for pair in self._touching[part]})
        return self._sum(near, other) - self._sum(near, labels)

    def _state(self, thing: int, labels: Flags) -> bool:
        low, demanding = self._demands[thing]
        return any(bool(labels[label]) == low for label in demanding) == low

    def _sum(self, pairs: Iterable[int], labels: Flags) -> Amounts:
        paid = [self.amounts[pair] for pair in pairs if not labels[self.pairs[pair][0]] and labels[self.pairs[pair][1]]]
        return Amounts(*(math.fsum(column) for column in zip(*paid, strict=True))) if paid else Amounts()


@dataclass(frozen=True)
class Influence:
    """How much the rounding of each value moves the gradients, as weights between 0 and 1: rounding to a unit roundoff
    u moves them by about u·√weight, relative to their size."""

    of: Mapping[fx.Node, float]
    """The weight of a value through all its readers."""
    through: Mapping[tuple[fx.Node, fx.Node], float]
    """The weight of a value through one of its readers."""

    differentiated: frozenset[fx.Node]
    """The values that have gradients; only these have weights."""

    def edge(self, value: fx.Node, reader: fx.Node) -> float:
        return self.through.get((value, reader), 0.0)


# Their results are elements of an operand, perhaps negated, so that they round nothing.
_ROUND_NOTHING = frozenset({"relu", "relu_", "neg", "abs", "masked_fill", "where", "cat", "concat", "stack", "maximum"})
# They read 16 bits and return fp32 without a cast.
_WIDEN_INSIDE = FP32_SET_DTYPE | {"mean"}
_NOTHING = OpPrice()


@dataclass
class _Readers:
    """The labels of the calls that read a value or its views, and what of it their backwards read."""

    low: list[int] = field(default_factory=list)
    """Labels of calls that read a 16-bit copy where their label is 1 and the value's is 0."""
    wide: list[int] = field(default_factory=list)
    """Labels of calls that read an fp32 copy where their label is 0 and the value's is 1."""
    widening: list[int] = field(default_factory=list)
    """Labels of calls that read 16 bits and return fp32 without a copy, so that only the gradient is cast."""
    saved: list[tuple[int, Saved, Saved]] = field(default_factory=list)
    """For each call its label, and what it saves of the value if it computes in fp32 and if in 16 bits."""

    @property
    def rounded(self) -> bool:
        """Whether a bf16 copy suffices for all calls that save the value in fp32."""
        return bool(self.saved) and all(wide is not Saved.WHOLE for _, wide, _ in self.saved)


class GraphTerms:
    """The cost of choosing the dtype of each call of one graph, as the terms of a minimum cut over labels: 0 for fp32,
    1 for 16 bits. `label_of` maps the name of a call whose dtype the cut decides to the number of its label.

    Calls that only move data have the label of their input. A value is cast once for all its readers in the other
    dtype, and so is its gradient. A value is saved once in every dtype in which the backward reads it, except for
    inputs and parameters, which are held anyway, and are cast again in the backward. Every rounding adds an error with
    the weight of its value: in 16-bit results and their gradients, in casts, and in values saved in bf16."""

    def __init__(
        self, graph: fx.Graph, plan: PrecisionPlan, free: frozenset[str], prices: OpPrices, influence: Influence
    ) -> None:
        self.graph, self.plan, self.free, self.prices, self.low = graph, plan, free, prices, plan.low
        self.terms = _LabelTerms()
        self.label_of: dict[str, int] = {}
        self._labels: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, _Readers] = defaultdict(_Readers)
        self._rounding: set[tuple[fx.Node, fx.Node]] = set()
        """Pairs of a value and a call whose backward may read it rounded."""
        self._forward: list[tuple[int, OpPrice, OpPrice]] = []
        self._influence = influence
        for node in self.graph.nodes:
            self._visit(node)
        for node, readers in self._readers.items():
            self._share(node, readers)
        for node in self.graph.nodes:
            self._round(node)

    def labels(self, plan: PrecisionPlan) -> Flags:
        """The values of all labels, by number, for the dtypes that a plan chooses: True for 16 bits."""
        chosen = {label: plan.choices[name].dtype == self.low for name, label in self.label_of.items()}
        return self.terms.complete(chosen)

    def forward_seconds(self, labels: Flags) -> float:
        return sum((low if labels[label] else wide).forward_seconds for label, wide, low in self._forward)

    def _visit(self, node: fx.Node) -> None:
        source = next(iter(sorted(node.all_input_nodes, key=lambda operand: not has_floats(operand))), None)
        self._roots[node] = node
        written = mutated_arguments(node) if node.op == "call_function" else ()
        looks = node.target is operator.getitem or op_name(node) == "detach" or is_view(node)
        if node.op != "call_function" or source is None:
            self._labels[node] = self._given(node)
        elif looks or is_new(node):
            self._labels[node] = self._labels[source]
            self._roots[node] = self._roots[source] if looks else node
        else:
            wide, low = (self._price(node, dtype) for dtype in (torch.float32, self.low))
            self._labels[node] = self._label(node, source, written, priced=wide is not None and low is not None)
            self._roots[node] = self._roots[written[0]] if written else node
            self._read(node, wide or _NOTHING, low or _NOTHING)

    def _label(self, node: fx.Node, source: fx.Node, written: tuple[fx.Node, ...], *, priced: bool) -> int:
        choice = self.plan.choices.get(node.name)
        if written or (choice is None and follows_input(node)):
            label = self._labels[written[0] if written else source]
            if choice is not None and label > ONE:
                self.label_of[node.name] = label
            return label
        if node.name in self.free and priced:
            return self.label_of.setdefault(node.name, self.terms.label())
        if choice is not None:
            return ONE if choice.dtype == self.low else ZERO
        return self._given(node)

    def _given(self, node: fx.Node) -> int:
        return ONE if any(tensor.dtype == self.low for tensor in tensors(node.meta.get("val"))) else ZERO

    def _price(self, node: fx.Node, dtype: torch.dtype) -> OpPrice | None:
        costs_alike = node.name not in self.free and node not in self._influence.differentiated
        if is_cast(node) or costs_alike:  # the cost of a cast depends on its input
            return _NOTHING
        return self.prices.price(node, dtype, self._influence.differentiated)

    def _read(self, node: fx.Node, wide: OpPrice, low: OpPrice) -> None:
        """Adds the price of a call in both dtypes, and notes it as a reader of its operands."""
        label = self._labels[node]
        for zero, one, price in ((label, ONE, wide), (ZERO, label, low)):
            seconds = price.forward_seconds + price.backward_seconds
            self.terms.add(zero, one, Amounts(seconds, price.inner_bytes))
        self._forward.append((label, wide, low))
        self._readers[self._roots[node]].saved.append((label, wide.result, low.result))
        given, name = operands(node), op_name(node)
        for place, number in enumerate(given):
            if not has_floats(number) or (place and name in CAST_FIRST_ONLY):
                continue
            readers = self._readers[self._roots[number]]
            if place < len(wide.operands) and place < len(low.operands):
                readers.saved.append((label, wide.operands[place], low.operands[place]))
                if wide.operands[place] is Saved.ROUNDED:
                    self._rounding.add((number, node))
            readers.low.append(label)
            widens = name in _WIDEN_INSIDE or (promotes(node) and len(given) > 1)
            (readers.widening if widens else readers.wide).append(label)

    def _share(self, node: fx.Node, readers: _Readers) -> None:
        """Adds what the readers of a value share: its casts, and what is saved of it for the backward."""
        source, elements = self._labels[node], _elements(node)
        traffic = op_seconds(0, 6 * elements, "float32", self.prices.hardware)
        back = node in self._influence.differentiated
        for low, labels in ((True, readers.low), (False, readers.wide)):
            if elements and labels:
                self.terms.shared(low, labels, source, Amounts(traffic * (1 + back)))
        for label in set(readers.widening):
            self.terms.add(label, source, Amounts(traffic * back))
        if node.op != "call_function" or not elements:
            return
        if readers.rounded and any(wide is not Saved.NOTHING for _, wide, _ in readers.saved):
            self.terms.add(ZERO, ONE, Amounts(nbytes=2 * elements))
            return
        if low16 := [label for label, _, saved in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(True, low16, ZERO, Amounts(nbytes=2 * elements))
        if wide := [label for label, saved, _ in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(False, wide, ONE, Amounts(nbytes=4 * elements))

    def _round(self, node: fx.Node) -> None:
        """Adds the errors of rounding a call's result, and its operands where they are cast."""
        label, name = self._labels[node], op_name(node)
        own = node.op == "call_function" and self._roots[node] is node and not (follows_input(node) or is_cast(node))
        if own and name not in _ROUND_NOTHING and not is_new(node):
            self.terms.add(ZERO, label, Amounts(error=2 * self._influence.of.get(node, 0.0)))
        for operand in node.all_input_nodes:
            source, error = self._labels[operand], Amounts(error=self._influence.edge(operand, node))
            root = self._roots[operand]
            narrow = (operand, node) in self._rounding and self._readers[root].rounded and root.op == "call_function"
            # If fp32 is saved in bf16, the backward reads it rounded whatever the forward of the call reads.
            self.terms.add(source, ONE if narrow else label, error)
            self.terms.add(label, source, error)


def _elements(node: fx.Node) -> int:
    """Returns the floating-point elements of a value; 0 if its size depends on data without bound."""
    try:
        floats = [tensor for tensor in tensors(node.meta.get("val")) if tensor.is_floating_point()]
        return sum(storage_bytes(value) // value.element_size() for value in floats)
    except ValueError:
        return 0

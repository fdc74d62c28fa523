"""What a choice of dtypes costs an operator graph, as terms between the labels of its calls."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import fx

from memopt.capture.operators import OperatorGraph
from memopt.device.storages import storage_bytes
from memopt.device.time_model import op_seconds
from memopt.rewrite.precision.influence import Influence, differentiated, influence
from memopt.rewrite.precision.label_terms import Amounts, LabelTerms
from memopt.rewrite.precision.op_prices import CAST_FIRST_ONLY, Kept, OpPrice, OpPrices, operands
from memopt.rewrite.precision.plan import PrecisionPlan
from memopt.solver.arrays import Flags
from memopt.solver.label_cut import ONE, ZERO
from passes.graphs.autocast_lists import FP32_SET_DTYPE
from passes.graphs.node_facts import tensors
from passes.graphs.op_kinds import follows_input, is_cast, is_new, is_view, mutated_arguments, op_name, promotes

# One of their operands, or of its elements, negated at most: no rounding of their own.
_ROUND_NOTHING = frozenset({"relu", "relu_", "neg", "abs", "masked_fill", "where", "cat", "concat", "stack", "maximum"})
# Read 16 bits and give fp32 without a cast.
_WIDEN_INSIDE = FP32_SET_DTYPE | {"mean"}
_NOTHING = OpPrice()


@dataclass
class _Readers:
    """Of one value and its views: the labels of the calls that read it, and what their backwards keep of it."""

    low: list[int] = field(default_factory=list)
    """Read a 16-bit copy where their label is 1 and the value's 0."""
    wide: list[int] = field(default_factory=list)
    """Read an fp32 copy where their label is 0 and the value's 1."""
    widening: list[int] = field(default_factory=list)
    """Read 16 bits and give fp32 without a copy: only the gradient is cast."""
    kept: list[tuple[int, Kept, Kept]] = field(default_factory=list)
    """Label, what is kept in fp32, what in 16 bits."""

    @property
    def rounded(self) -> bool:
        """Whether a bf16 copy is enough for all that keep an fp32 value."""
        return bool(self.kept) and all(wide is not Kept.WHOLE for _, wide, _ in self.kept)


class GraphTerms:
    """The terms of one graph. `label_of` has the label of each call, by name, that is not settled beforehand.

    Views and what only moves data have the label of what they read. A value is cast once for all that read it in the
    other dtype, and so is its gradient on the way back; it is saved once in each dtype that a backward reads it in, but
    for inputs and parameters, which are there anyway (their copies are cast again). Each rounding errs by its value's
    weight: of 16-bit results and of the gradients at them, at casts, and of what the backward reads in bf16.
    """

    def __init__(self, graph: OperatorGraph, plan: PrecisionPlan, free: frozenset[str], prices: OpPrices) -> None:
        assert plan.low is not None
        self.graph, self.plan, self.free, self.prices, self.low = graph.module.graph, plan, free, prices, plan.low
        self.terms = LabelTerms()
        self.label_of: dict[str, int] = {}
        self._labels: dict[fx.Node, int] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._readers: dict[fx.Node, _Readers] = defaultdict(_Readers)
        self._rounding: set[tuple[fx.Node, fx.Node]] = set()
        """Values and the calls whose backward may read them rounded."""
        self._forward: list[tuple[int, OpPrice, OpPrice]] = []
        self._differentiated = differentiated(self.graph, graph.parameter_inputs)
        self._influence: Influence = influence(self.graph, self._differentiated)
        for node in self.graph.nodes:
            self._visit(node)
        for node, readers in self._readers.items():
            self._share(node, readers)
        for node in self.graph.nodes:
            self._round(node)

    def labels(self, plan: PrecisionPlan) -> Flags:
        """The labels that stand for the choices of a plan."""
        chosen = {label: plan.choices[name].dtype == self.low for name, label in self.label_of.items()}
        return self.terms.complete(chosen)

    def forward_seconds(self, labels: Flags) -> float:
        return sum((low if labels[label] else wide).forward_seconds for label, wide, low in self._forward)

    def _visit(self, node: fx.Node) -> None:
        source = next(iter(sorted(node.all_input_nodes, key=lambda each: not _floats(each))), None)
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
        return ONE if any(each.dtype == self.low for each in tensors(node.meta.get("val"))) else ZERO

    def _price(self, node: fx.Node, dtype: torch.dtype) -> OpPrice | None:
        settled = node.name not in self.free and node not in self._differentiated
        if is_cast(node) or settled:  # what casts cost depends on what they read
            return _NOTHING
        return self.prices.price(node, dtype, self._differentiated)

    def _read(self, node: fx.Node, wide: OpPrice, low: OpPrice) -> None:
        label = self._labels[node]
        for zero, one, price in ((label, ONE, wide), (ZERO, label, low)):
            seconds = price.forward_seconds + price.backward_seconds
            self.terms.add(zero, one, Amounts(seconds, price.inner_bytes))
        self._forward.append((label, wide, low))
        self._readers[self._roots[node]].kept.append((label, wide.result, low.result))
        given, name = operands(node), op_name(node)
        for place, each in enumerate(given):
            if not _floats(each) or (place and name in CAST_FIRST_ONLY):
                continue
            readers = self._readers[self._roots[each]]
            if place < len(wide.operands) and place < len(low.operands):
                readers.kept.append((label, wide.operands[place], low.operands[place]))
                if wide.operands[place] is Kept.ROUNDED:
                    self._rounding.add((each, node))
            readers.low.append(label)
            widens = name in _WIDEN_INSIDE or (promotes(node) and len(given) > 1)
            (readers.widening if widens else readers.wide).append(label)

    def _share(self, node: fx.Node, readers: _Readers) -> None:
        source, elements = self._labels[node], _elements(node)
        traffic = op_seconds(0, 6 * elements, "float32", self.prices.hardware)
        back = node in self._differentiated
        for low, labels in ((True, readers.low), (False, readers.wide)):
            if elements and labels:
                self.terms.shared(low, labels, source, Amounts(traffic * (1 + back)))
        for label in set(readers.widening):
            self.terms.add(label, source, Amounts(traffic * back))
        if node.op != "call_function" or not elements:
            return
        if readers.rounded and any(wide is not Kept.NOTHING for _, wide, _ in readers.kept):
            self.terms.add(ZERO, ONE, Amounts(nbytes=2 * elements))
            return
        if low16 := [label for label, _, kept in readers.kept if kept is not Kept.NOTHING]:
            self.terms.shared(True, low16, ZERO, Amounts(nbytes=2 * elements))
        if wide := [label for label, kept, _ in readers.kept if kept is not Kept.NOTHING]:
            self.terms.shared(False, wide, ONE, Amounts(nbytes=4 * elements))

    def _round(self, node: fx.Node) -> None:
        label, name = self._labels[node], op_name(node)
        own = node.op == "call_function" and self._roots[node] is node and not (follows_input(node) or is_cast(node))
        if own and name not in _ROUND_NOTHING and not is_new(node):
            self.terms.add(ZERO, label, Amounts(error=2 * self._influence.of.get(node, 0.0)))
        for each in node.all_input_nodes:
            source, error = self._labels[each], Amounts(error=self._influence.edge(each, node))
            root = self._roots[each]
            narrow = (each, node) in self._rounding and self._readers[root].rounded and root.op == "call_function"
            # If fp32 is kept in bf16, the backward reads it rounded whatever the call itself reads.
            self.terms.add(source, ONE if narrow else label, error)
            self.terms.add(label, source, error)


def _elements(node: fx.Node) -> int:
    """Floating-point elements of a value; 0 where sizes depend on data and are not known."""
    try:
        floats = [each for each in tensors(node.meta.get("val")) if each.is_floating_point()]
        return sum(storage_bytes(each) // each.element_size() for each in floats)
    except ValueError:
        return 0


def _floats(node: fx.Node) -> bool:
    return any(each.is_floating_point() for each in tensors(node.meta.get("val")))

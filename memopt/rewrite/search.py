"""Decides the dtype of each operator by a minimum cut over time, saved bytes, casts and first-order error."""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from memopt.capture.operators import OperatorGraph
from memopt.device.storages import storage_bytes
from memopt.device.time_model import op_seconds
from memopt.rewrite.assign import FP32_OURS, KERNELS_SUM_IN_FP32, AssignPrecision
from memopt.rewrite.label_terms import Amounts, Influence, LabelTerms, differentiated, influence
from memopt.rewrite.op_prices import OpPrice, OpPrices, Saved, operands
from memopt.rewrite.policy import Choice, PrecisionPlan, dtype_name
from memopt.solver.arrays import Flags
from memopt.solver.label_cut import ONE, ZERO, cheapest_within, labels_of
from memopt.units import duration, size
from passes.graphs.node_facts import has_floats, tensors
from passes.graphs.op_kinds import (
    CAST_FIRST_ONLY,
    FP32,
    FP32_SET_DTYPE,
    LOWER_PRECISION,
    follows_input,
    is_cast,
    is_new,
    is_view,
    mutated_arguments,
    op_name,
    promotes,
)

# Their results are elements of an operand, perhaps negated, so that they round nothing.
_ROUND_NOTHING = frozenset({"relu", "relu_", "neg", "abs", "masked_fill", "where", "cat", "concat", "stack", "maximum"})
# They read 16 bits and return fp32 without a cast.
_WIDEN_INSIDE = FP32_SET_DTYPE | {"mean"}
_NOTHING = OpPrice()


@dataclass
class _Readers:
    """The labels of the calls that read a value or its views, and the bytes of it that their backwards read."""

    low: list[int] = field(default_factory=list)
    """Labels of calls that read a 16-bit copy where their label is 1 and the value's is 0."""
    wide: list[int] = field(default_factory=list)
    """Labels of calls that read an fp32 copy where their label is 0 and the value's is 1."""
    widening: list[int] = field(default_factory=list)
    """Labels of calls that read 16 bits and return fp32 without a copy, so that only the gradient is cast."""
    saved: list[tuple[int, Saved, Saved]] = field(default_factory=list)
    """For each call its label, and the bytes of the value that it saves in fp32 and in 16 bits."""

    @property
    def rounded(self) -> bool:
        """Whether a bf16 copy suffices for all calls that save the value in fp32."""
        return bool(self.saved) and all(wide is not Saved.WHOLE for _, wide, _ in self.saved)


class GraphTerms:
    """The terms of one graph. `label_of` has, by name, the labels of the calls whose dtype the cut decides.

    Calls that only move data have the label of their input. A value is cast once for all its readers in the other
    dtype, and so is its gradient. It is saved once in every dtype in which the backward reads it, except for inputs and
    parameters, which are held anyway (copies of them are cast again). Every rounding adds an error of its value's
    weight: of 16-bit results and their gradients, at casts, and of values that are saved in bf16.
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
        """Pairs of a value and a call whose backward may read it rounded."""
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
        """Returns the labels of a plan's choices."""
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
        costs_alike = node.name not in self.free and node not in self._differentiated
        if is_cast(node) or costs_alike:  # the cost of a cast depends on its input
            return _NOTHING
        return self.prices.price(node, dtype, self._differentiated)

    def _read(self, node: fx.Node, wide: OpPrice, low: OpPrice) -> None:
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
        if readers.rounded and any(wide is not Saved.NOTHING for _, wide, _ in readers.saved):
            self.terms.add(ZERO, ONE, Amounts(nbytes=2 * elements))
            return
        if low16 := [label for label, _, saved in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(True, low16, ZERO, Amounts(nbytes=2 * elements))
        if wide := [label for label, saved, _ in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(False, wide, ONE, Amounts(nbytes=4 * elements))

    def _round(self, node: fx.Node) -> None:
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


_IN_FP32 = FP32 | FP32_SET_DTYPE | FP32_OURS
_DOUBLINGS = 30


@dataclass(frozen=True)
class SearchPrecision:
    """Decides dtypes by a minimum cut over the choices that are free; others are those of the default.

    Free are elementwise operators, norms and the softmax of attention that the default gives 16 bits, and in bf16 also
    elementwise operators and norms that it keeps in fp32, unless an exponential, a loss, a sum or the like reads them.
    Everything else is as in the default: the user's rules, operators whose values leave fp16's range, casts to fp32 in
    the model, and autocast's fp32 and 16-bit lists; for the latter it is not known which fp32 kernels a device has. In
    fp16 all fp32 choices of the default remain, since they protect range as well as precision.

    The cut finds the least of `seconds of the step + price · bytes saved for the backward` among the choices that save
    no more bytes than the default and whose squared first-order error (`memopt.rewrite.label_terms`) is at most
    `most_error` times the default's. Seconds are those of operators and casts, forward and backward, on the device of
    `prices`. The price of a byte is that of recomputing it, the seconds of the forward divided by all saved bytes,
    both in the default; it doubles until no more bytes are saved than in the default. If nothing cheaper is found, the
    default is returned. The same graph gets the same choices.
    """

    default: AssignPrecision
    prices: OpPrices
    most_error: float = 1.1
    """Relative to the squared error of the default, whose measured error is 0.98 to 1.05 of autocast's: 5% of slack."""

    def __call__(self, graph: OperatorGraph) -> PrecisionPlan:
        plan = self.default(graph.module)
        nodes = {node.name: node for node in graph.module.graph.nodes}
        free = frozenset(name for name, choice in plan.choices.items() if self._is_free(nodes[name], choice))
        terms = GraphTerms(graph, plan, free, self.prices)
        given = terms.labels(plan)
        before = terms.terms.total(given)
        if not terms.label_of or not before.nbytes:
            return plan
        return self._plan(plan, terms, _search(terms, given, before, self.most_error), before)

    def _is_free(self, node: fx.Node, choice: Choice) -> bool:
        low, name = self.default.low, op_name(node)
        if choice.wished or mutated_arguments(node) or name in LOWER_PRECISION:
            return False
        if choice.dtype == low:
            return True
        if low == torch.float16 or is_cast(node) or node.kwargs.get("dtype") is not None:
            return False
        return (name in KERNELS_SUM_IN_FP32 or name not in _IN_FP32) and not _needs_all_bits(node)

    def _plan(self, plan: PrecisionPlan, terms: GraphTerms, found: Flags, before: Amounts) -> PrecisionPlan:
        choices, low = dict(plan.choices), self.default.low
        for name, label in terms.label_of.items():
            saves = terms.terms.flipping(label, found)
            chosen = Choice(low if found[label] else torch.float32, _reason(saves, low, found[label]))
            choices[name] = chosen if name in terms.free else replace(choices[name], dtype=chosen.dtype)
        after = terms.terms.total(found)
        rounding = (after.error / before.error) ** 0.5 if before.error else 1.0
        gains = _gains(before - after)
        note = f"search: the cut saves {gains} beside the default choices, at {rounding:.2f} of their rounding"
        return PrecisionPlan(plan.low, choices, (*plan.notes, note))


def _needs_all_bits(value: fx.Node) -> bool:
    """Returns whether an operator on the fp32 lists reads a value, directly or behind calls that only move data."""
    for reader in value.users:
        name = op_name(reader)
        if name in _IN_FP32 - KERNELS_SUM_IN_FP32 or (follows_input(reader) and _needs_all_bits(reader)):
            return True
    return False


def _search(terms: GraphTerms, given: Flags, before: Amounts, most_error: float) -> Flags:
    """Returns the cheapest labels within the error that save no more bytes than the given ones, or these."""
    price = terms.forward_seconds(given) / before.nbytes
    for _ in range(_DOUBLINGS):
        problem = terms.terms.problem(price)
        default = labels_of(problem, given)
        found = cheapest_within(problem, most_error * default.toll)
        if found.cost >= default.cost:
            break
        if terms.terms.total(found.of).nbytes <= before.nbytes:
            return found.of
        price *= 2
    return given


def _reason(saves: Amounts, low: torch.dtype, is_low: bool) -> str:
    """Returns the reason for a label, by the bytes and seconds that it saves: `cut: saves 12 MB and 0.03 ms`."""
    if is_low:
        return f"cut: saves {_gains(saves)}"
    gains, losses = _texts(Amounts(-saves.seconds, -saves.nbytes))
    if not gains:
        return f"cut: {dtype_name(low)} would " + (f"cost {losses} more" if losses else "save nothing")
    return f"cut: {dtype_name(low)} would save {gains}" + (f" for {losses}" if losses else ", but round more")


def _gains(saves: Amounts) -> str:
    """Returns `12 MB and 0.03 ms`, or with a loss `12 MB for 0.03 ms`."""
    gains, losses = _texts(saves)
    return (gains or "nothing") + (f" for {losses}" if losses else "")


def _texts(saves: Amounts) -> tuple[str, str]:
    """Returns two texts: the bytes and seconds that are saved, and those that are lost."""
    texts = [
        (saves.nbytes, size(round(abs(saves.nbytes))) if abs(saves.nbytes) >= 1 else ""),
        (saves.seconds, duration(abs(saves.seconds)) if abs(saves.seconds) >= 1e-9 else ""),
    ]
    return (
        " and ".join(text for value, text in texts if value > 0 and text),
        " and ".join(text for value, text in texts if value < 0 and text),
    )

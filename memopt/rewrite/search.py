"""Decides the dtype of each operator by a minimum cut over time, saved bytes, casts and first-order error.

The cost of choosing fp32 (label 0) or 16 bits (label 1) for the calls of a graph is a sum over pairs of labels: the
cost of a pair counts if its first label is 0 and its second is 1."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from memopt.capture.operators import OperatorGraph
from memopt.device.storages import storage_bytes
from memopt.device.time_model import op_seconds
from memopt.rewrite.dtypes import FP32_OURS, KERNELS_SUM_IN_FP32, AssignPrecision, Choice, PrecisionPlan, dtype_name
from memopt.rewrite.op_prices import OpPrice, OpPrices, Saved, operands
from memopt.solver.arrays import Flags
from memopt.solver.max_flow import ONE, ZERO, LabelProblem, cheapest_within, labels_of
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
    is_pointwise,
    is_view,
    mutated_arguments,
    op_name,
    promotes,
)

_SUMS = frozenset({"add", "add_", "sub", "sub_"})
_JOINS = frozenset({"cat", "concat", "stack", "hstack", "vstack"})
_IN_FP32 = FP32 | FP32_SET_DTYPE | FP32_OURS
_DOUBLINGS = 30


MOST_ERROR = 1.1
"""The largest squared error, as a multiple of the default's: 1.1 lets the error grow by 5%. The default's measured
error is 0.98 to 1.05 times autocast's."""


def search_precision(
    graph: OperatorGraph, default: AssignPrecision, prices: OpPrices, most_error: float = MOST_ERROR
) -> PrecisionPlan:
    """The dtypes of a graph by a minimum cut over the choices that are free; all others are those that `default` makes.

    Free to choose are the dtypes of elementwise operators, norms and the softmax of attention that the default gives 16
    bits, and in bf16 also elementwise operators and norms that it keeps in fp32, unless an exponential, a loss, a sum
    or the like reads them. Everything else is as in the default: the user's rules, operators whose values leave fp16's
    range, casts to fp32 in the model, and autocast's fp32 and 16-bit lists; for the 16-bit list it is not known which
    fp32 kernels a device has. In fp16 all fp32 choices of the default remain, since they protect range as well as
    precision.

    The cut finds the least of `seconds of the step + price · bytes saved for the backward` among the choices that save
    no more bytes than the default and whose squared first-order error (`_GraphTerms`) is at most
    `most_error` times the default's. Seconds are those of operators and casts, forward and backward, on the device of
    `prices`. The price of a byte is that of recomputing it, the seconds of the forward divided by all saved bytes, both
    in the default; it doubles until no more bytes are saved than in the default. If nothing cheaper is found, the
    default is returned. The same graph gets the same choices."""
    plan = default(graph.module)
    nodes = {node.name: node for node in graph.module.graph.nodes}
    free = frozenset(name for name, choice in plan.choices.items() if _is_free(nodes[name], choice, default))
    weights = influence(graph.module.graph, differentiated(graph.module.graph, graph.parameter_inputs))
    terms = _GraphTerms(graph.module.graph, plan, free, prices, weights)
    given = terms.labels(plan)
    before = terms.terms.total(given)
    if not terms.label_of or not before.nbytes:
        return plan
    return _changed(plan, terms, _search(terms, given, before, most_error), before)


def _is_free(node: fx.Node, choice: Choice, default: AssignPrecision) -> bool:
    low, name = default.low, op_name(node)
    if choice.wished or mutated_arguments(node) or name in LOWER_PRECISION:
        return False
    if choice.dtype == low:
        return True
    if low == torch.float16 or is_cast(node) or node.kwargs.get("dtype") is not None:
        return False
    return (name in default.sum_in_fp32 or name not in _IN_FP32) and not _needs_all_bits(node)


def _changed(plan: PrecisionPlan, terms: _GraphTerms, found: Flags, before: _Amounts) -> PrecisionPlan:
    """`plan` with the dtypes of the labels `found`, each with what it saves."""
    choices, low = dict(plan.choices), plan.low
    for name, label in terms.label_of.items():
        saves = terms.terms.flipping(label, found)
        chosen = Choice(low if found[label] else torch.float32, _reason(saves, low, found[label]))
        choices[name] = chosen if name in terms.free else replace(choices[name], dtype=chosen.dtype)
    after = terms.terms.total(found)
    rounding = (after.error / before.error) ** 0.5 if before.error else 1.0
    gains = _gains(before - after)
    note = f"search: the dtypes found save {gains} compared with the default, with {rounding:.2f} times its error"
    return PrecisionPlan(plan.low, choices, (*plan.notes, note))


def _needs_all_bits(value: fx.Node) -> bool:
    """Returns whether an operator on the fp32 lists reads a value, directly or behind calls that only move data."""
    for reader in value.users:
        name = op_name(reader)
        if name in _IN_FP32 - KERNELS_SUM_IN_FP32 or (follows_input(reader) and _needs_all_bits(reader)):
            return True
    return False


def _search(terms: _GraphTerms, given: Flags, before: _Amounts, most_error: float) -> Flags:
    """Returns the labels, which say what is computed in 16 bits, of the least cost in time and saved bytes among those
    whose error is at most `most_error` times that of the `given` ones, and which save no more bytes for the backward
    than `before` has; the given ones where none costs less."""
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


def _reason(saves: _Amounts, low: torch.dtype, is_low: bool) -> str:
    """Returns the reason for a label: `cut: saves 12 MB and 0.03 ms`. `saves` is what this value of the label saves
    compared with the other one."""
    if is_low:
        return f"cut: saves {_gains(saves)}"
    gains, losses = _texts(_Amounts(-saves.seconds, -saves.nbytes))
    if not gains:
        return f"cut: {dtype_name(low)} would " + (f"cost {losses} more" if losses else "save nothing")
    return f"cut: {dtype_name(low)} would save {gains}" + (f" for {losses}" if losses else ", but round more")


def _gains(saves: _Amounts) -> str:
    """Returns `12 MB and 0.03 ms`, or with a loss `12 MB for 0.03 ms`."""
    gains, losses = _texts(saves)
    return (gains or "nothing") + (f" for {losses}" if losses else "")


def _texts(saves: _Amounts) -> tuple[str, str]:
    """Returns two texts: the bytes and seconds that are saved, and those that are lost."""
    texts = [
        (saves.nbytes, size(round(abs(saves.nbytes))) if abs(saves.nbytes) >= 1 else ""),
        (saves.seconds, duration(abs(saves.seconds)) if abs(saves.seconds) >= 1e-9 else ""),
    ]
    return (
        " and ".join(text for value, text in texts if value > 0 and text),
        " and ".join(text for value, text in texts if value < 0 and text),
    )


def differentiated(graph: fx.Graph, parameter_inputs: Collection[int]) -> frozenset[fx.Node]:
    """Returns the floating-point values that depend on a parameter (an input at a position in `parameter_inputs`), and
    so have gradients."""
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


def influence(graph: fx.Graph, differentiated: frozenset[fx.Node]) -> _Influence:
    """Returns how much the rounding of each value moves the gradients: a model of `(gradient · rounding)²`, the
    first-order error, without data.

    Values are assumed to have variance 1, as normalised activations do, biases 0, and sums the sum of their operands'
    variances: a residual stream grows by 1 with each block. A relative error of a sum's operand becomes one of the sum
    in proportion to the operand's share; other operators pass it on unchanged. The loss has weight 1, and no value has
    more. Roundings are independent, so that weights add."""
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
    return _Influence(of, through, differentiated)


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


class _Amounts(NamedTuple):
    """The cost of a choice of dtypes, for one call or copy or the sum over several: seconds of the step, bytes saved
    for the backward, and the error in squared unit roundoffs."""

    seconds: float = 0.0
    nbytes: float = 0.0
    error: float = 0.0

    def __sub__(self, other: _Amounts) -> _Amounts:
        return _Amounts(*(one - two for one, two in zip(self, other, strict=True)))


@dataclass
class _LabelTerms:
    """Pairs of numbered labels with their amounts. A cast or a saved copy that several readers share has a label of its
    own, which is that of the copy's dtype where a reader demands the copy, else the other one."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    amounts: list[_Amounts] = field(default_factory=list)
    labels: int = 2
    _demands: dict[int, tuple[bool, list[int]]] = field(default_factory=dict)
    """By shared label: which value of the labels that share it demands it, and these labels."""
    _demanded: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _touching: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def label(self) -> int:
        self.labels += 1
        return self.labels - 1

    def add(self, zero: int, one: int, amounts: _Amounts) -> None:
        """Adds the cost of `zero` having label 0 while `one` has label 1."""
        if zero in (one, ONE) or one == ZERO or amounts == _Amounts():
            return
        for label in {zero, one}:
            self._touching[label].append(len(self.pairs))
        self.pairs.append((zero, one))
        self.amounts.append(amounts)

    def shared(self, low: bool, demanding: Iterable[int], source: int, amounts: _Amounts) -> None:
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

    def total(self, labels: Flags) -> _Amounts:
        return self._sum(range(len(self.pairs)), labels)

    def flipping(self, label: int, labels: Flags) -> _Amounts:
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

    def _sum(self, pairs: Iterable[int], labels: Flags) -> _Amounts:
        paid = [self.amounts[pair] for pair in pairs if not labels[self.pairs[pair][0]] and labels[self.pairs[pair][1]]]
        return _Amounts(*(math.fsum(column) for column in zip(*paid, strict=True))) if paid else _Amounts()


@dataclass(frozen=True)
class _Influence:
    """The effect of each value's rounding on the gradients, as weights between 0 and 1: rounding to a unit roundoff
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


class _GraphTerms:
    """The cost of choosing the dtype of each call of one graph, as the terms of a minimum cut over labels: 0 for fp32,
    1 for 16 bits. `label_of` maps the name of a call whose dtype the cut decides to the number of its label.

    Calls that only move data have the label of their input. A value is cast once for all its readers in the other
    dtype, and so is its gradient. A value is saved once in every dtype in which the backward reads it, except for
    inputs and parameters, which are held anyway, and are cast again in the backward. Every rounding adds an error with
    the weight of its value: in 16-bit results and their gradients, in casts, and in values saved in bf16."""

    def __init__(
        self, graph: fx.Graph, plan: PrecisionPlan, free: frozenset[str], prices: OpPrices, influence: _Influence
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
            self.terms.add(zero, one, _Amounts(seconds, price.inner_bytes))
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
                self.terms.shared(low, labels, source, _Amounts(traffic * (1 + back)))
        for label in set(readers.widening):
            self.terms.add(label, source, _Amounts(traffic * back))
        if node.op != "call_function" or not elements:
            return
        if readers.rounded and any(wide is not Saved.NOTHING for _, wide, _ in readers.saved):
            self.terms.add(ZERO, ONE, _Amounts(nbytes=2 * elements))
            return
        if low16 := [label for label, _, saved in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(True, low16, ZERO, _Amounts(nbytes=2 * elements))
        if wide := [label for label, saved, _ in readers.saved if saved is not Saved.NOTHING]:
            self.terms.shared(False, wide, ONE, _Amounts(nbytes=4 * elements))

    def _round(self, node: fx.Node) -> None:
        """Adds the errors of rounding a call's result, and its operands where they are cast."""
        label, name = self._labels[node], op_name(node)
        own = node.op == "call_function" and self._roots[node] is node and not (follows_input(node) or is_cast(node))
        if own and name not in _ROUND_NOTHING and not is_new(node):
            self.terms.add(ZERO, label, _Amounts(error=2 * self._influence.of.get(node, 0.0)))
        for operand in node.all_input_nodes:
            source, error = self._labels[operand], _Amounts(error=self._influence.edge(operand, node))
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

"""Decides the dtype of each operator by a minimum cut over time, saved bytes, casts and first-order error."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import fx

from memopt.capture.operators import OperatorGraph
from memopt.rewrite.assign import FP32_OURS, KERNELS_SUM_IN_FP32, AssignPrecision
from memopt.rewrite.label_terms import Amounts, GraphTerms, Influence
from memopt.rewrite.op_prices import OpPrices
from memopt.rewrite.policy import Choice, PrecisionPlan, dtype_name
from memopt.solver.arrays import Flags
from memopt.solver.max_flow import cheapest_within, labels_of
from memopt.units import duration, size
from passes.graphs.node_facts import has_floats
from passes.graphs.op_kinds import (
    FP32,
    FP32_SET_DTYPE,
    LOWER_PRECISION,
    follows_input,
    is_cast,
    is_pointwise,
    mutated_arguments,
    op_name,
)

_SUMS = frozenset({"add", "add_", "sub", "sub_"})
_JOINS = frozenset({"cat", "concat", "stack", "hstack", "vstack"})
_IN_FP32 = FP32 | FP32_SET_DTYPE | FP32_OURS
_DOUBLINGS = 30


@dataclass(frozen=True)
class SearchPrecision:
    """Decides dtypes by a minimum cut over the choices that are free; all others are those that `default` makes.

    Free to choose are the dtypes of elementwise operators, norms and the softmax of attention that the default gives 16
    bits, and in bf16 also elementwise operators and norms that it keeps in fp32, unless an exponential, a loss, a sum
    or the like reads them. Everything else is as in the default: the user's rules, operators whose values leave fp16's
    range, casts to fp32 in the model, and autocast's fp32 and 16-bit lists; for the 16-bit list it is not known which
    fp32 kernels a device has. In fp16 all fp32 choices of the default remain, since they protect range as well as
    precision.

    The cut finds the least of `seconds of the step + price · bytes saved for the backward` among the choices that save
    no more bytes than the default and whose squared first-order error (`memopt.rewrite.label_terms`) is at most
    `most_error` times the default's. Seconds are those of operators and casts, forward and backward, on the device of
    `prices`. The price of a byte is that of recomputing it, the seconds of the forward divided by all saved bytes, both
    in the default; it doubles until no more bytes are saved than in the default. If nothing cheaper is found, the
    default is returned. The same graph gets the same choices."""

    default: AssignPrecision
    prices: OpPrices
    most_error: float = 1.1
    """The largest squared error, as a multiple of the default's: 1.1 lets the error grow by 5%. The default's measured
    error is 0.98 to 1.05 times autocast's."""

    def __call__(self, graph: OperatorGraph) -> PrecisionPlan:
        plan = self.default(graph.module)
        nodes = {node.name: node for node in graph.module.graph.nodes}
        free = frozenset(name for name, choice in plan.choices.items() if self._is_free(nodes[name], choice))
        weights = influence(graph.module.graph, differentiated(graph.module.graph, graph.parameter_inputs))
        terms = GraphTerms(graph.module.graph, plan, free, self.prices, weights)
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
        return (name in self.default.sum_in_fp32 or name not in _IN_FP32) and not _needs_all_bits(node)

    def _plan(self, plan: PrecisionPlan, terms: GraphTerms, found: Flags, before: Amounts) -> PrecisionPlan:
        choices, low = dict(plan.choices), self.default.low
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


def _search(terms: GraphTerms, given: Flags, before: Amounts, most_error: float) -> Flags:
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


def _reason(saves: Amounts, low: torch.dtype, is_low: bool) -> str:
    """Returns the reason for a label: `cut: saves 12 MB and 0.03 ms`. `saves` is what this value of the label saves
    compared with the other one."""
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


def influence(graph: fx.Graph, differentiated: frozenset[fx.Node]) -> Influence:
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
    return Influence(of, through, differentiated)


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

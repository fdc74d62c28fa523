"""Decides the dtype of each operator by a minimum cut over time, saved bytes, casts and first-order error."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from memopt.capture.operators import OperatorGraph
from memopt.rewrite.precision import op_lists
from memopt.rewrite.precision.assign import AssignPrecision
from memopt.rewrite.precision.graph_terms import GraphTerms
from memopt.rewrite.precision.label_terms import Amounts
from memopt.rewrite.precision.op_prices import OpPrices
from memopt.rewrite.precision.plan import Choice, PrecisionPlan, dtype_name
from memopt.solver.arrays import Flags
from memopt.solver.max_flow import cheapest_within, labels_of
from memopt.units import duration, size
from passes.graphs.autocast_lists import FP32, FP32_SET_DTYPE, LOWER_PRECISION
from passes.graphs.op_kinds import follows_input, is_cast, mutated_arguments, op_name

_IN_FP32 = FP32 | FP32_SET_DTYPE | op_lists.FP32_OURS
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
    no more bytes than the default and whose squared first-order error (`memopt.rewrite.precision.influence`) is at most
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
        return (name in op_lists.KERNELS_SUM_IN_FP32 or name not in _IN_FP32) and not _needs_all_bits(node)

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
        if name in _IN_FP32 - op_lists.KERNELS_SUM_IN_FP32 or (follows_input(reader) and _needs_all_bits(reader)):
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

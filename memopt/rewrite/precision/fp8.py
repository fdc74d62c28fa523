"""Decides which linear layers compute in 8 bits, and which activations are kept so for the backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import fx

from memopt.capture.author_modes import autocast_is_on
from memopt.capture.operators import Decision, OperatorGraph, is_exact
from memopt.device.hardware_table import Hardware, scaled_rate
from memopt.device.time_model import op_seconds
from memopt.rewrite.precision.narrow import LEAST_BYTES, narrowing, sole_values
from memopt.rewrite.precision.rules import Rules
from memopt.units import duration
from passes import EliminateDeadCode, FoundLinear, Fp8Linears, Pipeline, QuantizeSaved, find_fp8_linears
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import is_cast, is_view, op_name
from passes.ops.fp8_formats import E4M3, E5M2, turned
from passes.ops.fp8_ops import SCALINGS, Scaling

FP8 = "fp8"
LEVERS = {FP8: "current", "fp8_delayed": "delayed", "fp8_block": "block", "mxfp8": "mx"}
"""How the layers of a lever are scaled: by `passes.ops.fp8_ops.SCALINGS`."""
FP8_ACTIVATIONS = "fp8_activations"
_SHORT = {E4M3: "e4m3", E5M2: "e5m2"}
# Factors of products, or arguments of derivatives that are smooth or a sign: a relative error of 2^-4 of theirs is one
# of single elements of gradients, and chance in its direction. Sums of squares and what saturates are not here.
_TOLERANT = frozenset({"gelu_backward", "mul", "silu_backward", "threshold_backward"})


def has_units(card: Hardware, lever: str = FP8) -> bool:
    """Whether a card multiplies in 8 bits what is scaled so, by its entry in the hardware table or by measurement."""
    return card.multiplies(SCALINGS[LEVERS[lever]].values)


@dataclass(frozen=True)
class DecideFp8:
    """Decides which linear layers of a region compute in 8 bits: e4m3 forward, gradients as their scaling has them.

    Layers that read the same value are decided on together, since they share its 8-bit copy. On a card with 8-bit units
    those are taken that the time model says are faster so; on others all are that could be, for what is kept of them is
    half as large. Left alone are layers that the units' sizes do not suit, those that no other layer follows, such as
    the one that makes the logits, those that share their weight with an embedding, and those whose types are the
    author's or the user's wish.
    """

    card: Hardware
    rules: Rules = field(default_factory=Rules)
    lever: str = FP8
    """One of `LEVERS`."""
    histories: str = ""
    """What names of the magnitudes begin with that delayed scaling remembers."""

    def __call__(self, graph: OperatorGraph) -> Decision:
        if autocast_is_on():
            return Decision(
                Pipeline((), label=self.lever), notes=(f"{self.lever}: torch.autocast is on: types are left to it",)
            )
        chosen: dict[str, str] = {}
        left: dict[str, None] = {}
        found = [self._judged(each, graph) for each in find_fp8_linears(graph.module, LEVERS[self.lever])]
        for _, group in groupby(sorted(found, key=lambda each: each.reads), key=lambda each: each.reads):
            layers = list(group)
            left |= dict.fromkeys(each.reason for each in layers if each.reason)
            free = [each for each in layers if not each.reason]
            slower, text = self._compared(free)
            if slower:
                left[text] = None
            else:
                chosen |= {each.name: f"fp8: {text}" for each in free}
        notes = tuple(f"{self.lever}: left alone, since {reason}" for reason in left)
        if not chosen:
            return Decision(Pipeline((), label=self.lever), notes=notes)
        scaling, by = LEVERS[self.lever], self._scaling
        passes = Fp8Linears(frozenset(chosen), scaling, self.histories), EliminateDeadCode()
        units = "" if self._quick else f"; {self.card.name} multiplies wider copies of them"
        done = (
            f"{self.lever}: {len(chosen)} of {len(found)} layers in e4m3, gradients in {_SHORT[by.gradients]}, "
            f"{scaling} scaling{units}"
        )
        return Decision(Pipeline(passes, label=self.lever), chosen, (done, *notes))

    @property
    def _scaling(self) -> Scaling:
        return SCALINGS[LEVERS[self.lever]]

    @property
    def _quick(self) -> bool:
        return has_units(self.card, self.lever)

    def _judged(self, layer: FoundLinear, graph: OperatorGraph) -> FoundLinear:
        """With the reason why it is not to be rewritten, if it could."""
        node = next(each for each in graph.module.graph.nodes if each.name == layer.name)
        reason = layer.reason
        if node.name in graph.author_typed:
            reason = "its types are the model's own choice"
        elif self.rules.choose(node) is not None:
            reason = "a rule of yours gives its type"
        elif _is_last(node):
            reason = "no other layer follows it"
        elif _is_embedding(node):
            reason = "its weight is an embedding's too"
        return FoundLinear(layer.name, layer.reads, reason) if reason else layer

    def _compared(self, layers: list[FoundLinear]) -> tuple[bool, str]:
        """Whether layers of one input are slower in 8 bits, and how long they take."""
        if not self._quick:
            return False, "what is kept of it is half as large"
        wide = sum(_seconds(each, "bfloat16", self.card) for each in layers)
        rate = scaled_rate(self._scaling.values)
        narrow = sum(_seconds(each, rate, self.card) for each in layers)
        narrow += _quantizing(layers, self._scaling, self.card)
        if narrow >= wide:
            return bool(layers), "its matrices are too small for 8 bits to be faster"
        return False, f"{duration(wide)} would become {duration(narrow)}"


def _seconds(layer: FoundLinear, rate: str, card: Hardware) -> float:
    """Of the three products of a layer and its gradients at such a rate of the card, with results of 16 bits."""
    size = 2 if rate == "bfloat16" else 1
    rows, inner, columns = layer.rows, layer.inner, layer.columns
    flops, operands = 2 * rows * inner * columns, (rows * inner, inner * columns, rows * columns)
    moved = [size * (sum(operands) - result) + 2 * result for result in operands]
    return sum(op_seconds(flops, each, rate, card) for each in moved)


def _quantizing(layers: list[FoundLinear], by: Scaling, card: Hardware) -> float:
    """Of what comes with them: the input quantised once for all, weights and gradients for each (two looks at 16 bits,
    8 written), by tiles once along each of their sums, and three operands turned for kernels that take them only as
    they lie in the forward's product."""
    if not layers:
        return 0.0
    values, weights = (1 if turned(tile) == tile else 2 for tile in (by.values, by.weights))
    bytes_moved = [5 * values * layers[0].rows * layers[0].inner]
    for each in layers:
        of_x, of_weight, of_result = each.rows * each.inner, each.inner * each.columns, each.rows * each.columns
        # An fp32 weight is quantised where it would have been cast, which moves 6 bytes an element.
        bytes_moved += [(9 * weights - 6) * of_weight, 5 * values * of_result, 2 * of_x, 2 * of_weight, 2 * of_result]
    return sum(op_seconds(0, each, "float32", card) for each in bytes_moved)


def _is_last(layer: fx.Node) -> bool:
    """Whether no other linear layer reads what comes of it."""
    pending, seen = [layer], {layer}
    while pending:
        for user in pending.pop().users:
            if op_name(user) in ("linear", "addmm"):
                return False
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return True


def _is_embedding(layer: fx.Node) -> bool:
    weight = layer.args[2 if op_name(layer) == "addmm" else 1]
    assert isinstance(weight, fx.Node)
    while (is_cast(weight) or is_view(weight)) and weight.all_input_nodes:
        weight = weight.all_input_nodes[0]
    return any(op_name(user) == "embedding" for user in weight.users)


def note_activations(graph: OperatorGraph) -> Decision:
    """Says what `quantizing` will do to the joint graph; nothing is to be done to this one."""
    note = f"{FP8_ACTIVATIONS}: what activations and products keep for the backward is kept in 8 bits"
    return Decision(Pipeline((), label=FP8_ACTIVATIONS), notes=(note,))


def quantizing(module: fx.GraphModule, forward_outputs: int) -> Pipeline:
    """The passes for the joint graph of a region in 16 bits: what is kept of activations is kept in 8."""
    narrow = narrowing(module, forward_outputs)
    return Pipeline((*narrow, QuantizeSaved(quantized(module.graph, forward_outputs))))


def quantized(graph: fx.Graph, forward_outputs: int) -> tuple[str, ...]:
    """The 16-bit values of the forward that only operators of the backward that tolerate it read, by name."""
    backward = backward_nodes(graph)
    values = sole_values(graph, forward_outputs)
    return tuple(node.name for node in values if _worth(node) and _tolerated(node.users, backward))


def _worth(node: fx.Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    large = value.numel() * value.element_size() >= LEAST_BYTES
    return large and value.dim() > 1 and value.is_contiguous() and not is_exact(node)


def _tolerated(readers: Iterable[fx.Node], backward: frozenset[fx.Node]) -> bool:
    late = [reader for reader in readers if reader in backward]
    return all(
        _tolerated(reader.users, backward) if is_view(reader) else op_name(reader) in _TOLERANT and not is_exact(reader)
        for reader in late
    )

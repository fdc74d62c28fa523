"""Decides which activations are saved for the backward in bf16 or 8 bits, and which linear layers compute in 8 bits."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import fx

from memopt.capture.blocks import traced_from
from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.operators import Decision, OperatorGraph
from memopt.device.hardware import Hardware, scaled_rate
from memopt.device.storages import storage_bytes
from memopt.device.time_model import op_seconds
from memopt.rewrite.dtypes import Rules
from memopt.units import duration
from passes import (
    EliminateDeadCode,
    FoundLinear,
    Fp8Linears,
    NarrowSaved,
    Pipeline,
    SumInFp32,
    find_fp8_linears,
)
from passes.graphs.aliases import storages
from passes.graphs.node_facts import backward_nodes, graph_results
from passes.graphs.op_kinds import is_cast, is_pointwise, is_view, op_name
from passes.ops.fp8_formats import E4M3, E5M2, turned
from passes.ops.fp8_ops import SCALINGS, Fp8Scaling

# They read operands of products, or of smooth derivatives: a relative error of 2^-9 there is one of the gradients, no
# more than their own rounding. `_log_softmax_backward_data` is not here: it takes the exponential.
_TOLERATE_BF16 = frozenset(
    {
        "_fused_rms_norm_backward", "_softmax_backward_data", "gelu_backward", "mul", "native_batch_norm_backward",
        "native_group_norm_backward", "native_layer_norm_backward", "pow", "sigmoid_backward", "silu_backward",
        "tanh_backward", "threshold_backward",
    }
)  # fmt: skip
# Smaller values are not worth two casts.
LEAST_BYTES = 64 * 1024


def narrowing(module: fx.GraphModule, forward_outputs: int, exact: frozenset[str] = frozenset()) -> Pipeline:
    """Returns the passes for the joint graph of a bf16 region that save activations in 16 bits.

    The graph's first `forward_outputs` outputs are those of the forward. `exact` holds the names of the operator
    graph's nodes whose dtype the author or the user has set."""
    return Pipeline((SumInFp32(), NarrowSaved(narrowed(module.graph, forward_outputs, exact), torch.bfloat16)))


def narrowed(graph: fx.Graph, forward_outputs: int, exact: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Returns the names of the fp32 values of the forward that the backward reads only by operators whose gradients
    hardly change if the value is rounded to bf16. The arguments are as in `narrowing`.

    Left out are values that are held anyway, as inputs or outputs, values that the backward reads through several
    views, widened 16-bit values, small ones, those from which the gradient of a single-number parameter is computed
    (`read_for_numbers`), and all that the author or the user wants in fp32."""
    backward = backward_nodes(graph)
    values = filter(worth_narrowing, _saved_values(graph, forward_outputs))
    return tuple(node.name for node in values if tolerated(node, backward, exact))


def read_for_numbers(backward: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The values of the forward from which the `backward` nodes compute, by elementwise operators, views and norms, the
    gradient of a parameter that is a single number, such as a learned weight of the residual stream.

    That gradient is a sum over a whole activation whose terms may nearly cancel each other, as before a norm, which
    makes the scale of its input irrelevant: rounding each term by 2^-9 could change the sum by more than its size."""
    pending = [node for node in backward if op_name(node) == "sum" and _sums_all(node)]
    seen, found = set(pending), set()
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in backward:
                found.add(source)
            elif source not in seen and _is_on_the_way(source):
                seen.add(source)
                pending.append(source)
    return frozenset(found)


def _is_on_the_way(node: fx.Node) -> bool:
    """Whether `read_for_numbers` goes on beyond a node: `getitem` too, as backwards of norms have several results."""
    picks_one = node.target is operator.getitem
    return picks_one or is_pointwise(node) or is_view(node) or op_name(node) in _TOLERATE_BF16 | {"sum", "_to_copy"}


def _sums_all(node: fx.Node) -> bool:
    """Whether a sum is a single number, of a value that is worth narrowing."""
    value, of = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return all(str(size) == "1" for size in value.shape) and storage_bytes(of) >= LEAST_BYTES


def _saved_values(graph: fx.Graph, forward_outputs: int) -> tuple[fx.Node, ...]:
    """Returns the values that the forward computes and the backward reads, but for the `forward_outputs` outputs and
    those of `read_for_numbers`.

    Where the backward reads several values that share a storage, such as views of one, all of them are left out."""
    backward = backward_nodes(graph)
    outputs = [result for result in graph_results(graph)[:forward_outputs] if isinstance(result, fx.Node)]
    kept = [*graph.find_nodes(op="placeholder"), *outputs]
    stays = {storage for node in kept for storage in storages(node)}
    seen: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node not in backward and node.op == "call_function" and any(user in backward for user in node.users):
            for storage in storages(node):
                seen.setdefault(storage, []).append(node)
    left_out = read_for_numbers(backward)
    sole = (nodes[0] for storage, nodes in seen.items() if storage not in stays and len(nodes) == 1)
    return tuple(node for node in sole if node not in left_out)


def worth_narrowing(node: fx.Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or is_cast(node):
        return False
    if value.dim() == 0 or value.shape[-1] == 1:  # a statistic of each row: few bytes, and every element depends on it
        return False
    return storage_bytes(value) >= LEAST_BYTES


def tolerated(
    value: fx.Node,
    backward: frozenset[fx.Node],
    exact: frozenset[str] = frozenset(),
    tolerant: frozenset[str] = _TOLERATE_BF16,
) -> bool:
    """Whether the backward reads a value only by `tolerant` operators, also through views.

    By default these are the operators that may read it in bf16. Anything traced from a node in `exact` is not
    tolerated."""
    if traced_from(value) in exact:
        return False
    return all(
        tolerated(reader, backward, exact, tolerant)
        if is_view(reader)
        else op_name(reader) in tolerant and traced_from(reader) not in exact
        for reader in value.users
        if reader in backward
    )


FP8_ACTIVATIONS = "fp8_activations"
_SHORT = {E4M3: "e4m3", E5M2: "e5m2"}
# They read factors of products, or arguments of derivatives that are smooth or a sign: a relative error of 2^-4 there
# becomes a random one in single elements of gradients. Sums of squares, and functions that saturate, are not here.
_TOLERATE_8_BITS = frozenset({"gelu_backward", "mul", "silu_backward", "threshold_backward"})


def has_units(card: Hardware, scaling: str = "current") -> bool:
    """Whether a card has units for 8-bit products with the scaling `scaling` (one of `SCALINGS`), by the hardware table
    or by measurement."""
    return card.multiplies(SCALINGS[scaling].values)


@dataclass(frozen=True)
class DecideFp8:
    """Decides which linear layers of a region compute in 8 bits: e4m3 in the forward, gradients in the format that
    `scaling` has for them.

    Layers that read the same value are decided together, since they share its 8-bit copy. On a card with 8-bit units
    the layers are chosen that the time model predicts to be faster in 8 bits; on others all that are possible, since
    they save half as many bytes. Layers are left alone if the kernels do not take their sizes, if they are the last
    (the one that makes the logits), if they share their weight with an embedding, or if the author or the user has set
    their dtype."""

    card: Hardware
    rules: Rules = field(default_factory=Rules)
    lever: str = "fp8"
    scaling: str = "current"
    """One of `passes.ops.fp8_ops.SCALINGS`."""
    histories: str = ""
    """The prefix of the `Histories` that delayed scaling uses."""

    def __call__(self, graph: OperatorGraph) -> Decision:
        if autocast_is_on():
            note = f"{self.lever}: no layer computes in 8 bits, since torch.autocast is on and decides the dtypes"
            return Decision(Pipeline((), label=self.lever), notes=(note,))
        chosen: dict[str, str] = {}
        left: dict[str, None] = {}
        found = [self._judged(layer, graph) for layer in find_fp8_linears(graph.module, self.scaling)]
        for _, group in groupby(sorted(found, key=lambda layer: layer.reads), key=lambda layer: layer.reads):
            layers = list(group)
            left |= dict.fromkeys(layer.reason for layer in layers if layer.reason)
            free = [layer for layer in layers if not layer.reason]
            slower, text = self._compared(free)
            if slower:
                left[text] = None
            else:
                chosen |= {layer.name: f"fp8: {text}" for layer in free}
        notes = tuple(f"{self.lever}: a layer is left alone, since {reason}" for reason in left)
        if not chosen:
            return Decision(Pipeline((), label=self.lever), notes=notes)
        passes = Fp8Linears(frozenset(chosen), self.scaling, self.histories), EliminateDeadCode()
        gradients = _SHORT[SCALINGS[self.scaling].gradients]
        share = f"{len(chosen)} of {len(found)} layers"
        done = f"{self.lever}: {share} in e4m3, gradients in {gradients}, {self.scaling} scaling"
        if not has_units(self.card, self.scaling):
            done += f"; {self.card.name} has no such 8-bit units and multiplies dequantised copies"
        return Decision(Pipeline(passes, label=self.lever), chosen, (done, *notes))

    def _judged(self, layer: FoundLinear, graph: OperatorGraph) -> FoundLinear:
        """Returns a layer, with the reason if it is not to be rewritten."""
        node = next(other for other in graph.module.graph.nodes if other.name == layer.name)
        reason = layer.reason
        if node.name in graph.author_typed:
            reason = "its dtypes are the model's own choice"
        elif self.rules.choose(node) is not None:
            reason = "a rule of yours sets its dtype"
        elif _is_last(node):
            reason = "no other layer follows it"
        elif _is_embedding(node):
            reason = "an embedding shares its weight"
        return FoundLinear(layer.name, layer.reads, reason) if reason else layer

    def _compared(self, layers: list[FoundLinear]) -> tuple[bool, str]:
        """Returns whether layers that read one value are slower in 8 bits, and a text with their times."""
        if not has_units(self.card, self.scaling):
            return False, "in 8 bits it saves half as many bytes for the backward"
        wide = sum(_seconds(layer, "bfloat16", self.card) for layer in layers)
        by = SCALINGS[self.scaling]
        rate = scaled_rate(by.values)
        narrow = sum(_seconds(layer, rate, self.card) for layer in layers)
        narrow += _quantizing(layers, by, self.card)
        if narrow >= wide:
            return bool(layers), "its matrices are too small for 8 bits to be faster"
        return False, f"{duration(wide)} would become {duration(narrow)}"


def _seconds(layer: FoundLinear, rate: str, card: Hardware) -> float:
    """Returns the seconds of a layer's product and the two products of its gradients, with 16-bit results, at a `rate`
    of the card."""
    size = 2 if rate == "bfloat16" else 1
    rows, inner, columns = layer.rows, layer.inner, layer.columns
    flops, operands = 2 * rows * inner * columns, (rows * inner, inner * columns, rows * columns)
    moved = [size * (sum(operands) - result) + 2 * result for result in operands]
    return sum(op_seconds(flops, nbytes, rate, card) for nbytes in moved)


def _quantizing(layers: list[FoundLinear], by: Fp8Scaling, card: Hardware) -> float:
    """Returns the seconds of quantising the operands of layers that read one value.

    The input is quantised once for all, weights and gradients for each layer: read twice in 16 bits and written in 8,
    with tiles for each summed dimension. Three operands are transposed for the kernels."""
    if not layers:
        return 0.0
    values, weights = (1 if turned(tile) == tile else 2 for tile in (by.values, by.weights))
    bytes_moved = [5 * values * layers[0].rows * layers[0].inner]
    for layer in layers:
        of_x, of_weight, of_result = layer.rows * layer.inner, layer.inner * layer.columns, layer.rows * layer.columns
        # An fp32 weight is quantised where it would have been cast, which moves 6 bytes an element.
        bytes_moved += [(9 * weights - 6) * of_weight, 5 * values * of_result, 2 * of_x, 2 * of_weight, 2 * of_result]
    return sum(op_seconds(0, nbytes, "float32", card) for nbytes in bytes_moved)


def _is_last(layer: fx.Node) -> bool:
    """Returns whether no other linear layer depends on a layer's result."""
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
    """A `Decision` that leaves the operator graph as it is, and adds a note to the plan that operands are saved in 8
    bits. The passes that do so run on the joint graph; `quantizing` returns them."""
    note = f"{FP8_ACTIVATIONS}: activations and products save their operands for the backward in 8 bits"
    return Decision(Pipeline((), label=FP8_ACTIVATIONS), notes=(note,))


def quantizing(module: fx.GraphModule, forward_outputs: int, exact: frozenset[str] = frozenset()) -> Pipeline:
    """Returns the passes for the joint graph of a 16-bit region that save 16-bit activations in 8 bits, and fp32 ones
    in bf16 as `narrowing` does. The arguments are as in `narrowing`."""
    narrow = narrowing(module, forward_outputs, exact)
    return Pipeline((*narrow, NarrowSaved(quantized(module.graph, forward_outputs, exact), E4M3)))


def quantized(graph: fx.Graph, forward_outputs: int, exact: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Returns the names of the 16-bit values of the forward that the backward reads only by operators whose gradients
    hardly change if the value is rounded to 8 bits. The arguments are as in `narrowing`."""
    backward = backward_nodes(graph)
    return tuple(
        node.name
        for node in _saved_values(graph, forward_outputs)
        if _worth_quantizing(node.meta["val"]) and tolerated(node, backward, exact, _TOLERATE_8_BITS)
    )


def _worth_quantizing(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
        return False
    return storage_bytes(value) >= LEAST_BYTES and value.dim() > 1 and value.is_contiguous()

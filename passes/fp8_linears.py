"""Makes linear layers compute from 8-bit copies of their input and weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.graphs.edit import new_call
from passes.graphs.node_facts import module_path
from passes.graphs.op_kinds import is_cast, is_view, op_name
from passes.ops.fp8_formats import DELAYED_SCALE, E4M3
from passes.ops.fp8_kernels import why_not
from passes.ops.fp8_ops import CURRENT, DELAYED, FP8_LINEAR, SCALINGS
from passes.patterns.loss_pattern import Linear
from passes.rewrite_pattern import RewritePattern, check_named

_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FoundLinear:
    """A linear layer in an operator graph, and why `Fp8Linears` cannot rewrite it, where it cannot."""

    name: str
    """The name of its node."""
    reads: str
    """The name of its input's node, behind views: layers that read the same one share its 8-bit copy."""
    reason: str = ""
    """Why it is left alone; empty if it can be rewritten."""
    rows: int = 0
    inner: int = 0
    """The columns of its input."""
    columns: int = 0
    """The columns of its result. `rows`, `inner` and `columns` are 0 if it is left alone."""


def find_fp8_linears(graph_module: GraphModule, scaling: str = CURRENT) -> tuple[FoundLinear, ...]:
    """Returns the linear layers of an operator graph, in the graph's order: calls of `linear`, and of `addmm` with a
    bias vector. Each has the reason if `Fp8Linears` cannot rewrite it.

    Args:
        scaling: one of `passes.ops.fp8_ops.SCALINGS`, whose kernels decide which sizes are possible.
    """
    matches = (_match(node) for node in graph_module.graph.nodes)
    return tuple(_found(match, SCALINGS[scaling].product) for match in matches if match is not None)


def _match(node: Node) -> Linear | None:
    args: Any = node.args
    if op_name(node) == "linear":
        return Linear(node, args[0], args[1], args[2] if len(args) > 2 else None, transposed=False)
    if op_name(node) == "addmm" and not node.kwargs and args[0].meta["val"].dim() == 1:
        return Linear(node, args[1], args[2], args[0], transposed=True)
    return None


def _found(match: Linear, tiles: tuple[str, str]) -> FoundLinear:
    source = match.hidden
    while is_view(source) and source.all_input_nodes:
        source = source.all_input_nodes[0]
    x, weight = match.hidden.meta["val"], match.weight.meta["val"]
    if x.dtype not in _LOW:
        return FoundLinear(match.node.name, source.name, "it does not compute in 16 bits")
    if weight.dim() != 2:
        return FoundLinear(match.node.name, source.name, "its weight is no matrix")
    inner, columns = weight.shape if match.transposed else reversed(weight.shape)
    rows = x.numel() // inner if inner else 0
    if reason := why_not(rows, inner, columns, *tiles):
        return FoundLinear(match.node.name, source.name, reason)
    return FoundLinear(match.node.name, source.name, "", rows, inner, columns)


@dataclass(frozen=True)
class Fp8Linears(RewritePattern[Linear]):
    """Makes the named linear layers compute from 8-bit copies of input and weight, and save those for the backward.

    A weight that is cast for the layer is quantised from its value before the cast. Layers whose sizes 8-bit kernels do
    not take are refused: see `find_fp8_linears`. Results and gradients differ by the rounding to 8 bits.

    Before:
        to: bf16[32, 16] = aten.to.dtype(weight, bf16)
        linear: bf16[16, 32] = aten.linear(x, to)
    After Fp8Linears(frozenset({"linear"})):
        fp8_linear: bf16[16, 32] = memopt.fp8_linear(x, weight)
    """

    linears: frozenset[str]
    scaling: str = CURRENT
    """One of `passes.ops.fp8_ops.SCALINGS`."""
    histories: str = ""
    """With delayed scaling: the prefix of the `Histories` that remember magnitudes."""

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"the scaling of Fp8Linears is one of {', '.join(SCALINGS)}, not {self.scaling!r}")

    def __repr__(self) -> str:
        return f"Fp8Linears({len(self.linears)} layers, {self.scaling} scaling)"

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        reasons = {layer.name: layer.reason for layer in find_fp8_linears(graph_module, self.scaling)}
        mend = "name only layers that find_fp8_linears says can be rewritten"
        check_named(self.linears, reasons, "it is no linear layer", mend)

    def match(self, node: Node) -> Linear | None:
        return _match(node) if node.name in self.linears else None

    def replace(self, node: Node, found: Linear) -> Node:
        arguments: tuple[Any, ...] = (found.hidden, _before_casts(found.weight))
        options: dict[str, Any] = {} if self.scaling == CURRENT else {"scaling": self.scaling}
        if self.scaling == DELAYED:
            name = f"{self.histories}{module_path(node)}/{node.name}"
            # Layers that read one value share its scale.
            known = (user for user in found.hidden.users if user.target is DELAYED_SCALE)
            scale = next(known, None) or new_call(node, DELAYED_SCALE, found.hidden, E4M3, name)
            arguments = (*arguments, found.bias, scale)
            options["history"] = f"{name}/gradient"
        elif found.bias is not None:
            arguments = (*arguments, found.bias)
        options |= {"turned": True} if found.transposed else {}
        return new_call(node, FP8_LINEAR, *arguments, **options)


def _before_casts(weight: Node) -> Node:
    """Returns the fp32 matrix that a weight is cast from, or the weight itself."""
    if not is_cast(weight) or len(weight.all_input_nodes) != 1:
        return weight
    source: Any = weight.all_input_nodes[0]
    wide, narrow = source.meta["val"], weight.meta["val"]
    return source if wide.dtype == torch.float32 and wide.device == narrow.device else weight

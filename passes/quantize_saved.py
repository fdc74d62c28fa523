"""Saves activations for the backward in 8 bits."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.edit import new_call, on_stored_values
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import is_view
from passes.graphs.verify import VerifyError, named_nodes
from passes.ops.fp8_formats import E4M3
from passes.ops.fp8_ops import DEQUANTIZE, QUANTIZE

_RESHAPE = torch.ops.aten.view.default
_TILE = "1x128"


@dataclass(frozen=True)
class QuantizeSaved(Pass):
    """Makes the backward of a joint graph read the named values from 8-bit copies, with a scale for each 128 values of
    a row.

    They are quantised where the forward makes them, and dequantised where the backward first reads them. If a layer of
    the forward makes such an 8-bit copy anyway, that copy is saved.

    Before:
        silu: bf16[8, 256] = aten.silu(primals_1)
        mul: bf16[8, 256] = aten.mul.Tensor(tangents_1, silu)
    After QuantizeSaved(("silu",)):
        silu: bf16[8, 256] = aten.silu(primals_1)
        fp8_quantize: (f8_e4m3fn[8, 256], f32[8, 2]) = memopt.fp8_quantize(silu, f8_e4m3fn, '1x128')
        getitem: f8_e4m3fn[8, 256] = fp8_quantize[0]
        getitem_1: f32[8, 2] = fp8_quantize[1]
        fp8_dequantize: bf16[8, 256] = memopt.fp8_dequantize(getitem, getitem_1, bf16)
        mul: bf16[8, 256] = aten.mul.Tensor(tangents_1, fp8_dequantize)
    """

    graph: ClassVar[GraphKind] = "joint"

    values: tuple[str, ...]

    def __repr__(self) -> str:
        return f"QuantizeSaved({len(self.values)} values)"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        backward = backward_nodes(graph)
        with on_stored_values(graph):
            for value in named_nodes(graph, self.values):
                stored = value.meta["val"]
                has_rows = isinstance(stored, torch.Tensor) and stored.dim() > 0 and stored.is_contiguous()
                if value.op == "placeholder" or not has_rows:
                    raise VerifyError(
                        value.name,
                        "this value is an input of the graph, or no contiguous tensor with dimensions",
                        "name contiguous results of operators only",
                    )
                _quantize(value, [node for node in graph.nodes if node in backward])
        return graph_module


def _quantize(value: Node, backward: list[Node]) -> None:
    readers = [node for node in backward if value in node.all_input_nodes]
    if not readers:
        return
    shape, dtype = value.meta["val"].shape, value.meta["val"].dtype
    narrow, scale = _existing_copy(value, frozenset(backward)) or _new_copy(value)
    with value.graph.inserting_before(readers[0]):
        given = new_call(readers[0], DEQUANTIZE, narrow, scale, dtype)
        if len(shape) != 2:
            given = new_call(readers[0], _RESHAPE, given, list(shape))
    for reader in readers:
        reader.replace_input_with(value, given)


def _existing_copy(value: Node, backward: frozenset[Node]) -> tuple[Node, Node] | None:
    """Returns the 8-bit copy and scales that the forward has made of a value, or of a view with the same rows."""
    copies = [user for user in value.users if user not in backward and user.target is QUANTIZE and user.args[1] == E4M3]
    if copies:
        # Of two copies, the one that is saved for the backward anyway.
        copy = max(copies, key=lambda copy: any(not backward.isdisjoint(element.users) for element in copy.users))
        by_index: dict[Any, Node] = {user.args[1]: user for user in copy.users}
        return (by_index[0], by_index[1]) if {0, 1} <= by_index.keys() else None
    for user in value.users:
        if user in backward:
            continue
        same = is_view(user) and user.meta["val"].shape[-1:] == value.meta["val"].shape[-1:]
        if same and user.meta["val"].dim() == 2 and user.target is _RESHAPE:
            found = _existing_copy(user, backward)
            if found is not None:
                return found
    return None


def _new_copy(value: Node) -> tuple[Node, Node]:
    graph, shape = value.graph, value.meta["val"].shape
    with graph.inserting_after(value):
        rows = value
        if len(shape) != 2:
            rows = new_call(value, _RESHAPE, value, [-1, shape[-1]])
    with graph.inserting_after(rows):
        copy = new_call(value, QUANTIZE, rows, E4M3, _TILE)
    found = [copy]
    for index in (0, 1):
        with graph.inserting_after(found[-1]):
            found.append(new_call(copy, operator.getitem, copy, index))
    return found[1], found[2]

"""Saves activations for the backward in fewer bits, while the forward computes with all of them."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.edit import new_call, on_stored_values, refresh
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import op_name, promotes
from passes.graphs.verify import VerifyError, named_nodes
from passes.ops.fp8_formats import E4M3
from passes.ops.fp8_ops import DEQUANTIZE, QUANTIZE

_CAST = torch.ops.aten._to_copy.default
_RESHAPE = torch.ops.aten.view.default
_TILE = "1x128"


@dataclass(frozen=True)
class NarrowSaved(Pass):
    """Makes the backward of a joint graph read the named values in fewer bits.

    They are narrowed to `dtype` where the forward makes them, and widened where the backward first reads them. If the
    forward makes such a copy anyway, that copy is saved. With a `dtype` of 16 bits, kernels that promote their operands
    to the wider dtype read the narrow copy directly. With e4m3 there is a scale for each 128 values of a row.

    Before:
        exp: f32[8, 256] = aten.exp(primals_1)
        mul: f32[8, 256] = aten.mul.Tensor(tangents_1, exp)
    After NarrowSaved(("exp",), f8_e4m3fn):
        exp: f32[8, 256] = aten.exp(primals_1)
        fp8_quantize: (f8_e4m3fn[8, 256], f32[8, 2]) = memopt.fp8_quantize(exp, f8_e4m3fn, '1x128')
        getitem: f8_e4m3fn[8, 256] = fp8_quantize[0]
        getitem_1: f32[8, 2] = fp8_quantize[1]
        fp8_dequantize: f32[8, 256] = memopt.fp8_dequantize(getitem, getitem_1, f32)
        mul: f32[8, 256] = aten.mul.Tensor(tangents_1, fp8_dequantize)
    """

    graph: ClassVar[GraphKind] = "joint"

    values: tuple[str, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"NarrowSaved({len(self.values)} values, {str(self.dtype).removeprefix('torch.')})"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        backward = backward_nodes(graph)
        with on_stored_values(graph):
            for value in named_nodes(graph, self.values):
                if self.dtype == E4M3:
                    _check_rows(value)
                readers = sorted(user for user in value.users if user in backward)
                if readers and self.dtype == E4M3:
                    _quantize(value, readers, backward)
                elif readers:
                    _cast(value, readers, backward, self.dtype)
        return graph_module


def _cast(value: Node, readers: list[Node], backward: frozenset[Node], dtype: torch.dtype) -> None:
    rounded = (user for user in value.users if user.target is _CAST and user.kwargs == {"dtype": dtype})
    narrow = next((copy for copy in rounded if copy not in backward), None)
    if narrow is None:
        with value.graph.inserting_after(value):
            narrow = new_call(value, _CAST, value, dtype=dtype, node_name="narrow")
    for reader in [promoting for promoting in readers if _widens(promoting, value)]:
        readers.remove(reader)
        reader.replace_input_with(value, narrow)
        _refresh_all(reader)
    if readers:
        with value.graph.inserting_before(readers[0]):
            wide = new_call(readers[0], _CAST, narrow, dtype=value.meta["val"].dtype, node_name="wide")
        for reader in readers:
            reader.replace_input_with(value, wide)


def _widens(reader: Node, value: Node) -> bool:
    """Returns whether a call gives the same result for the narrow value as for the widened one: if it promotes the
    value to another operand's dtype, or if it is exact in any dtype and all its readers promote it."""
    if reader.op != "call_function" or reader.all_input_nodes.count(value) != 1:
        return False
    others = [source for source in reader.all_input_nodes if source is not value]
    if others:
        return promotes(reader) and any(_is_like(other, value) for other in others)
    number = reader.args[1] if len(reader.args) == 2 else None
    exact = (op_name(reader), number) in (("pow", 1), ("mul", 2), ("mul", 1))
    return exact and bool(reader.users) and all(_widens(user, reader) for user in reader.users)


def _is_like(other: Node, value: Node) -> bool:
    """Returns whether `other` is no scalar and has the dtype of `value`, and so decides the result's dtype."""
    tensor = other.meta.get("val")
    return isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.dtype == value.meta["val"].dtype


def _refresh_all(reader: Node) -> None:
    """Recomputes the stored values of a call and of the exact calls behind it."""
    refresh(reader)
    if len(reader.all_input_nodes) == 1:
        for user in reader.users:
            _refresh_all(user)


def _check_rows(value: Node) -> None:
    stored = value.meta["val"]
    has_rows = isinstance(stored, torch.Tensor) and stored.dim() > 0 and stored.is_contiguous()
    if value.op == "placeholder" or not has_rows:
        problem = "this value is an input of the graph, or no contiguous tensor with dimensions"
        raise VerifyError(value.name, problem, "name contiguous results of operators only")


def _quantize(value: Node, readers: list[Node], backward: frozenset[Node]) -> None:
    shape, dtype = value.meta["val"].shape, value.meta["val"].dtype
    narrow, scale = _existing_copy(value, backward) or _new_copy(value)
    with value.graph.inserting_before(readers[0]):
        given = new_call(readers[0], DEQUANTIZE, narrow, scale, dtype)
        if len(shape) != 2:
            given = new_call(readers[0], _RESHAPE, given, list(shape))
    for reader in readers:
        reader.replace_input_with(value, given)


def _existing_copy(value: Node, backward: frozenset[Node]) -> tuple[Node, Node] | None:
    """Returns the 8-bit copy and scales that the forward has made of a value, or of a view with the same rows."""
    forward = [user for user in value.users if user not in backward]
    copies = [user for user in forward if user.target is QUANTIZE and user.args[1] == E4M3]
    if copies:
        # Of two copies, the one that is saved for the backward anyway.
        copy = max(copies, key=lambda copy: any(not backward.isdisjoint(element.users) for element in copy.users))
        by_index: dict[Any, Node] = {user.args[1]: user for user in copy.users}
        return (by_index[0], by_index[1]) if {0, 1} <= by_index.keys() else None
    for user in forward:
        shape = user.meta["val"].shape if user.target is _RESHAPE else ()
        if len(shape) == 2 and shape[-1:] == value.meta["val"].shape[-1:] and (found := _existing_copy(user, backward)):
            return found
    return None


def _new_copy(value: Node) -> tuple[Node, Node]:
    graph, rows = value.graph, value
    if value.meta["val"].dim() != 2:
        with graph.inserting_after(value):
            rows = new_call(value, _RESHAPE, value, [-1, value.meta["val"].shape[-1]])
    with graph.inserting_after(rows):
        copy = new_call(value, QUANTIZE, rows, E4M3, _TILE)
    with graph.inserting_after(copy):
        narrow = new_call(copy, operator.getitem, copy, 0)
    with graph.inserting_after(narrow):
        return narrow, new_call(copy, operator.getitem, copy, 1)

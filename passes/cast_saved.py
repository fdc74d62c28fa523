"""Saves activations for the backward in 16 bits, while the forward computes with all of their bits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.edit import new_call, on_stored_values, refresh
from passes.graphs.node_facts import backward_nodes
from passes.graphs.op_kinds import op_name, promotes
from passes.graphs.verify import named_nodes

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class CastSaved(Pass):
    """Makes the backward of a joint graph read the named values rounded to `dtype`.

    They are rounded where the forward makes them, and widened where the backward first reads them. If the forward makes
    a rounded copy anyway, that copy is saved. Kernels that promote their operands to the wider dtype read the rounded
    copy directly.

    Before:
        softmax: f32[8, 4] = aten._softmax(primals_1, -1, False)
        _softmax_backward_data: f32[8, 4] = aten._softmax_backward_data(tangents_1, softmax, -1, f32)
    After CastSaved(("softmax",), bf16):
        softmax: f32[8, 4] = aten._softmax(primals_1, -1, False)
        narrow: bf16[8, 4] = aten._to_copy(softmax, dtype=bf16)
        wide: f32[8, 4] = aten._to_copy(narrow, dtype=f32)
        _softmax_backward_data: f32[8, 4] = aten._softmax_backward_data(tangents_1, wide, -1, f32)
    """

    graph: ClassVar[GraphKind] = "joint"

    values: tuple[str, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"CastSaved({len(self.values)} values, {str(self.dtype).removeprefix('torch.')})"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        backward = backward_nodes(graph)
        place = {node: number for number, node in enumerate(graph.nodes) if node in backward}
        with on_stored_values(graph):
            for value in named_nodes(graph, self.values):
                self._narrow(value, place)
        return graph_module

    def _narrow(self, value: Node, backward: Mapping[Node, int]) -> None:
        readers = sorted(filter(backward.__contains__, value.users), key=backward.__getitem__)
        if not readers:
            return
        rounded = (user for user in value.users if user.target is _CAST and user.kwargs == {"dtype": self.dtype})
        narrow = next((copy for copy in rounded if copy not in backward), None)
        if narrow is None:
            with value.graph.inserting_after(value):
                narrow = new_call(value, _CAST, value, dtype=self.dtype, node_name="narrow")
        for reader in [promoting for promoting in readers if _widens(promoting, value)]:
            readers.remove(reader)
            reader.replace_input_with(value, narrow)
            _refresh_all(reader)
        if not readers:
            return
        with value.graph.inserting_before(readers[0]):
            wide = new_call(readers[0], _CAST, narrow, dtype=value.meta["val"].dtype, node_name="wide")
        for reader in readers:
            reader.replace_input_with(value, wide)


def _widens(reader: Node, value: Node) -> bool:
    """Returns whether a call gives the same result for the narrow value as for the widened one.

    That holds if it promotes the value to the dtype of another operand, or if it is exact in any dtype and all its
    readers promote it.
    """
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

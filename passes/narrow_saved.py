"""Activations that are kept for the backward in 16 bits, while the forward computes with all of their bits."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.node_facts import backward_nodes
from passes.propagate import on_stored_values, refresh
from passes.verify import VerifyError

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class NarrowSaved(Pass):
    """Has the backward of a joint graph read the named values by way of `dtype`: rounded once the forward has made
    them, widened where the backward reads them first. A rounded copy that the forward has already is taken.

    Before:
        add: f32[8, 4] = aten.add.Tensor(primals_1, mm)
        rsqrt: f32[8, 4] = aten.rsqrt(add)
        mul: f32[8, 4] = aten.mul.Tensor(tangents_1, add)
    After NarrowSaved(("add",), bf16):
        add: f32[8, 4] = aten.add.Tensor(primals_1, mm)
        narrow: bf16[8, 4] = aten._to_copy(add, dtype=bf16)
        rsqrt: f32[8, 4] = aten.rsqrt(add)
        wide: f32[8, 4] = aten._to_copy(narrow, dtype=f32)
        mul: f32[8, 4] = aten.mul.Tensor(tangents_1, wide)
    """

    values: tuple[str, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"NarrowSaved({len(self.values)} values, {str(self.dtype).removeprefix('torch.')})"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        named = {node.name: node for node in graph.nodes}
        backward = backward_nodes(graph)
        with on_stored_values(graph):
            for name in self.values:
                if name not in named:
                    raise VerifyError(name, "there is no such node", "name values of the graph that is rewritten")
                self._narrow(named[name], [node for node in graph.nodes if node in backward])
        return graph_module

    def _narrow(self, value: Node, backward: list[Node]) -> None:
        readers = [node for node in backward if value in node.all_input_nodes]
        if not readers:
            return
        narrow = next((user for user in value.users if self._rounds(user) and user not in backward), None)
        if narrow is None:
            with value.graph.inserting_after(value):
                narrow = value.graph.create_node("call_function", _CAST, (value,), {"dtype": self.dtype}, name="narrow")
            self._describe(narrow, value)
        with value.graph.inserting_before(readers[0]):
            wide = value.graph.create_node(
                "call_function", _CAST, (narrow,), {"dtype": value.meta["val"].dtype}, name="wide"
            )
        self._describe(wide, readers[0])
        for reader in readers:
            reader.replace_input_with(value, wide)

    def _rounds(self, node: Node) -> bool:
        return node.target is _CAST and node.meta["val"].dtype == self.dtype and set(node.kwargs) == {"dtype"}

    @staticmethod
    def _describe(cast: Node, place: Node) -> None:
        """A cast belongs to the module and to the half of the graph where it stands."""
        cast.meta.update({key: each for key, each in place.meta.items() if key not in ("val", "tensor_meta")})
        refresh(cast)

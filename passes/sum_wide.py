"""Sums that give fp32 at once, rather than 16 bits that are widened after."""

from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.op_kinds import is_cast, is_view
from passes.graphs.propagate import on_stored_values, refresh

_SUMS = frozenset({torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default})


@dataclass(frozen=True)
class SumWide(Pass):
    """Has a sum of 16-bit values whose result is only cast to fp32, perhaps by way of a view, give fp32: kernels sum
    in fp32 anyway, so that one rounding and one cast go. The gradients of biases are such sums.

    Before:
        sum_1: bf16[1, 4] = aten.sum.dim_IntList(x, [0], True)
        view: bf16[4] = aten.view(sum_1, [4])
        _to_copy: f32[4] = aten._to_copy(view, dtype=f32)
    After:
        sum_1: f32[1, 4] = aten.sum.dim_IntList(x, [0], True, dtype=f32)
        view: f32[4] = aten.view(sum_1, [4])
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        with on_stored_values(graph):
            for cast in list(graph.nodes):
                if not is_cast(cast) or not _only_widens(cast):
                    continue
                chain = _chain_to_sum(cast)
                if not chain:
                    continue
                chain[-1].update_kwarg("dtype", torch.float32)
                for node in reversed(chain):
                    refresh(node)
                cast.replace_all_uses_with(chain[0])
                graph.erase_node(cast)
        return graph_module


def _only_widens(cast: Node) -> bool:
    source = cast.all_input_nodes[0].meta["val"]
    low = isinstance(source, torch.Tensor) and source.dtype in (torch.bfloat16, torch.float16)
    return low and cast.meta["val"].dtype == torch.float32 and cast.meta["val"].device == source.device


def _chain_to_sum(cast: Node) -> list[Node]:
    """The views from a cast back to a sum, and the sum, each read by the next alone; empty where there is none."""
    chain = [cast.all_input_nodes[0]]
    while is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1 and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    last = chain[-1]
    return chain if last.target in _SUMS and len(last.users) == 1 and "dtype" not in last.kwargs else []

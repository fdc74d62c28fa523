"""Makes sums return fp32 rather than 16 bits that are widened afterwards."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from passes.graph_pass import GraphKind
from passes.graphs.edit import refresh
from passes.graphs.op_kinds import is_cast, is_view
from passes.rewrite_pattern import RewritePattern

_SUMS = frozenset({torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default})


@dataclass(frozen=True)
class SumInFp32(RewritePattern[list[Node]]):
    """Makes a sum of 16-bit values that is only cast to fp32, perhaps after views, return fp32.

    Kernels sum in fp32 anyway, so that this saves a rounding and a cast. The gradients of biases are such sums.

    Before:
        sum_1: bf16[1, 4] = aten.sum.dim_IntList(x, [0], True)
        view: bf16[4] = aten.view(sum_1, [4])
        _to_copy: f32[4] = aten._to_copy(view, dtype=f32)
    After:
        sum_1: f32[1, 4] = aten.sum.dim_IntList(x, [0], True, dtype=f32)
        view: f32[4] = aten.view(sum_1, [4])
    """

    graph: ClassVar[GraphKind] = "joint"

    def match(self, node: Node) -> list[Node] | None:
        return (is_cast(node) and _only_widens(node) and _chain_to_sum(node)) or None

    def replace(self, node: Node, found: list[Node]) -> Node:
        found[-1].update_kwarg("dtype", torch.float32)
        for link in reversed(found):
            refresh(link)
        return found[0]


def _only_widens(cast: Node) -> bool:
    source = cast.all_input_nodes[0].meta["val"]
    low = isinstance(source, torch.Tensor) and source.dtype in (torch.bfloat16, torch.float16)
    return low and cast.meta["val"].dtype == torch.float32 and cast.meta["val"].device == source.device


def _chain_to_sum(cast: Node) -> list[Node]:
    """Returns the views from a cast back to a sum, and the sum, if only the next one reads each; else []."""
    chain = [cast.all_input_nodes[0]]
    while is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1 and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    last = chain[-1]
    return chain if last.target in _SUMS and len(last.users) == 1 and "dtype" not in last.kwargs else []

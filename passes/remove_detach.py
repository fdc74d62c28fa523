"""Removes operators that have a meaning for autograd only."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from passes.graph_pass import GraphKind
from passes.graphs.node_facts import may_write
from passes.graphs.op_kinds import is_view
from passes.rewrite_pattern import RewritePattern

_NO_OPERATIONS = frozenset(
    {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}
)


@dataclass(frozen=True)
class RemoveDetach(RewritePattern[Node]):
    """Replaces detach, alias and lift_fresh by their input: after differentiation they compute nothing.

    A call that the graph returns, itself or by a view of it, is kept if its input is returned too, is an input of the
    graph, or is a view: result and input must remain two tensors. (Autograd treats a view of a returned tensor that
    requires gradients as requiring them too.)

    Before:
        tanh: f32[4] = aten.tanh(primals_1)
        detach: f32[4] = aten.detach(tanh)
        tanh_backward: f32[4] = aten.tanh_backward(tangents_1, detach)
    After:
        tanh: f32[4] = aten.tanh(primals_1)
        tanh_backward: f32[4] = aten.tanh_backward(tangents_1, tanh)
    """

    graph: ClassVar[GraphKind] = "joint"

    def match(self, node: Node) -> Node | None:
        if node.target not in _NO_OPERATIONS:
            return None
        (source,) = node.all_input_nodes
        returned = node.graph.output_node()
        must_differ = source.op in ("placeholder", "get_attr") or returned in source.users or is_view(source)
        if (must_differ and _is_returned(node, returned)) or _written_to(node) or _written_to(source):
            return None
        return source

    def replace(self, node: Node, found: Node) -> Node:
        return found


def _is_returned(node: Node, returned: Node) -> bool:
    """Returns whether the graph returns the tensor or a view of it."""
    return returned in node.users or any(_is_returned(user, returned) for user in node.users if is_view(user))


def _written_to(node: Node) -> bool:
    """Returns whether an operator may write to the tensor, or change its sizes, which a detached view keeps."""
    return any(may_write(user) for user in node.users)

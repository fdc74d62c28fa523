"""The passes that bring every joint graph into one form before it is planned, and their pipeline."""

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.forward_writes import ForwardWrites
from passes.graph_pass import GraphKind, Pass, Pipeline
from passes.graphs.aliases import WAIT, storages
from passes.graphs.edit import replace_node
from passes.graphs.node_facts import argument_key, backward_nodes, binds_new_symbols, is_pure, may_write, tensors
from passes.graphs.op_kinds import is_view
from passes.rewrite_pattern import RewritePattern


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Removes pure calls and constants that nothing uses; random ones are kept, since they advance the generator.

    Before:
        mul: f32[4] = aten.mul.Tensor(primals_1, 2.0)
        native_dropout: (f32[4], b8[4]) = aten.native_dropout(primals_1, 0.1, True)
        getitem: f32[4] = native_dropout[0]
        return (primals_1,)
    After:
        native_dropout: (f32[4], b8[4]) = aten.native_dropout(primals_1, 0.1, True)
        return (primals_1,)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        # Users come after their inputs, so one walk from the end frees whole chains.
        for node in reversed(graph_module.graph.nodes):
            if not node.users and is_pure(node):
                graph_module.graph.erase_node(node)
        return graph_module


_OF_AUTOGRAD = frozenset(
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
        if node.target not in _OF_AUTOGRAD:
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


@dataclass(frozen=True)
class MergeCommonSubexpressions(Pass):
    """Merges pure calls of the same operator on the same arguments, bit for bit the same value.

    A backward call is merged with a forward one only if the value is a view or has at most `across_halves_bytes`:
    saving anything larger is the planner's decision. Two calls with a write to memory between them, and values that are
    returned or written to, are left alone. This undoes recomputation: run it before planning.

    Before:
        t: f32[8, 4] = aten.t(primals_1)
        t_1: f32[8, 4] = aten.t(primals_1)
        mm: f32[2, 4] = aten.mm(primals_2, t_1)
    After:
        t: f32[8, 4] = aten.t(primals_1)
        mm: f32[2, 4] = aten.mm(primals_2, t)
    """

    across_halves_bytes: int = 65_536

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        backward = backward_nodes(graph)
        held = {node: storages(node) for node in graph.nodes}
        returned = set(graph.output_node().all_input_nodes)
        written = (source for node in graph.nodes if may_write(node) for source in node.all_input_nodes)
        # Values in storages that are returned or may be written to are not merged.
        untouchable = frozenset[Hashable]().union(*map(held.__getitem__, {*returned, *written}))
        writes_so_far = 0
        first_of: dict[Hashable, Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if not is_pure(node):
                writes_so_far += may_write(node)
                continue
            own = held[node].difference(*(held[source] for source in node.all_input_nodes))
            if node in returned or own & untouchable or binds_new_symbols(node):
                continue
            apart = node in backward and bool(own) and _size_bytes(node) > self.across_halves_bytes
            key = (node.target, argument_key((node.args, node.kwargs)), apart, writes_so_far)
            first = first_of.setdefault(key, node)
            if first is not node:
                replace_node(node, first)
        return graph_module


def _size_bytes(node: Node) -> int | float:
    """Returns the bytes of a call's outputs; infinite if a size is symbolic, since reading it would add a guard."""
    values = list(tensors(node.meta.get("val")))
    known = all(isinstance(size, int) for value in values for size in value.shape)
    return sum(value.numel() * value.element_size() for value in values) if known else float("inf")


@dataclass(frozen=True)
class NextToProducer(Pass):
    """Moves every wait for a collective, and every getitem, directly after the call whose result it reads.

    What a collective reads and writes is in use until its wait: nothing may be written over it, and it takes memory. Of
    a tuple's elements, those that are unused are freed at once.

    Before:
        split: (f32[2], f32[2]) = aten.split.Tensor(primals_1, 2)
        neg: f32[2] = aten.neg(primals_2)
        getitem: f32[2] = split[0]
    After:
        split: (f32[2], f32[2]) = aten.split.Tensor(primals_1, 2)
        getitem: f32[2] = split[0]
        neg: f32[2] = aten.neg(primals_2)
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        for node in graph.find_nodes(op="call_function", target=WAIT) if WAIT else ():
            collective = node.args[0]
            if isinstance(collective, Node) and collective.op == "call_function" and _half(collective) == _half(node):
                collective.append(node)
        last_of: dict[Node, Node] = {}
        for node in graph.find_nodes(op="call_function", target=operator.getitem):
            producer = node.args[0]
            # An input that is a tuple stays with the other inputs, which come first.
            if not isinstance(producer, Node) or producer.op == "placeholder" or not isinstance(node.args[1], int):
                continue
            last_of.get(producer, producer).append(node)
            last_of[producer] = node
        return graph_module


def _half(node: Node) -> object:
    """Returns forward or backward, as tagged: a wait in the other half of the step stays there."""
    return node.meta.get("partitioner_tag")


# Dead code goes first; without detaches and writes more calls are equal; merging scatters getitems: these are last.
CANONICAL = Pipeline(
    (EliminateDeadCode(), RemoveDetach(), ForwardWrites(), MergeCommonSubexpressions(), NextToProducer())
)
"""The passes that make a joint graph canonical; it computes the same, bit for bit."""

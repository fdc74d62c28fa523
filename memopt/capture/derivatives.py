"""Regions whose code takes derivatives itself (forces, penalties, physics): their graphs are prepared for a backward
that differentiates these derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo import GraphBreak
from memopt.capture.dynamo_graph import graphs_within, nodes_within
from memopt.compat.operators import (
    SETS_GRAD_MODE,
    HigherOrderOperator,
    begins_transform,
    custom_function,
    requiring_grad,
    takes_derivative,
)

DIFFERENTIATED = "create_graph=True asks for gradients of gradients, which a captured backward does not have"
TAKEN_WITHIN = (
    "take the derivative in a loss_fn of (model, batch) that you give to optimize, or call memopt.remove(model)"
)


def takes_derivatives(graph_module: fx.GraphModule) -> bool:
    """Whether the code of a region takes derivatives itself, by `torch.autograd.grad` or a transform of torch.func."""
    return any(takes_derivative(node.target) for node in nodes_within(graph_module))


def prepare_derivatives(graph_module: fx.GraphModule) -> frozenset[int]:
    """Prepare a region's graph, whose code may take derivatives itself, to be differentiated; returns the numbers of
    the inputs that must require a gradient when the region runs, because its code calls `requires_grad_` on them.

    Edits the graph: calls of `requires_grad_` and of an `autograd.Function` are replaced. Raises `GraphBreak` where the
    graph would lose derivatives that the plain model computes."""
    derives = takes_derivatives(graph_module)
    found = _take_requires_grad(graph_module, derives=derives)
    if derives:
        _replace_functions(graph_module)
    return found


def forward_of(graph_module: fx.GraphModule) -> Callable[..., Any]:
    """A function that runs the forward of a region, to be called with gradients disabled. The function enables
    gradients where the region's own code takes derivatives."""
    return torch.enable_grad()(graph_module.forward) if takes_derivatives(graph_module) else graph_module.forward


def _take_requires_grad(graph_module: fx.GraphModule, *, derives: bool) -> frozenset[int]:
    """Remove the calls of `value.requires_grad_()` whose results nothing reads; returns the numbers of the inputs that
    have such calls.

    Where the value is an input, operators before the call read it detached. Where it is an intermediate value and
    `derives` says that the region takes derivatives itself, operators after the call read a leaf in its place;
    otherwise no gradient of a parameter depends on the call.

    Raises `GraphBreak` where the region returns an intermediate value, since its `.grad` can be read after the
    backward. If the code itself takes the derivative by that value, it is returned as it was before the call instead.
    """
    inputs = graph_module.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    for inner in graphs_within(graph_module):
        graph = inner.graph
        calls = [node for node in graph.find_nodes(op="call_method", target="requires_grad_") if not node.users]
        returned = set(graph.output_node().all_input_nodes)
        for call in calls:
            value: Any = call.args[0]
            nodes = list(graph.nodes)
            at = nodes.index(call)
            if value in inputs:
                found.add(inputs.index(value))
                _read_apart(value, torch.detach, [node for node in nodes[:at] if node in value.users])
            elif value in returned and not any(user.target is torch.autograd.grad for user in value.users):
                raise GraphBreak(
                    "the model returns or keeps a value on which it has called requires_grad_(); return a value "
                    "computed from it instead"
                )
            elif derives:
                users = [node for node in nodes[at + 1 :] if node in value.users and node.op != "output"]
                _read_apart(value, requiring_grad, users)
                value.meta["example_value"] = value.meta["example_value"].detach()
            graph.erase_node(call)
        if calls:
            inner.recompile()
    return frozenset(found)


def _read_apart(value: fx.Node, by: Callable[[torch.Tensor], torch.Tensor], users: Sequence[fx.Node]) -> None:
    """Have `users` of a value, which are in the order of the graph, read `by(value)` in its place."""
    if not users:
        return
    with value.graph.inserting_before(users[0]):
        apart = value.graph.call_function(by, (value,))
    apart.meta = {**value.meta, "example_value": by(value.meta["example_value"])}
    for user in users:
        user.replace_input_with(value, apart)


def _replace_functions(graph_module: fx.GraphModule) -> None:
    """Have each `autograd.Function` run such that its backward is differentiated again. Raises `GraphBreak` for one
    within a transform of torch.func, and for other operators that hold graphs: torch's derivatives of their derivatives
    are not known to be right."""
    nodes = [(inner, node) for inner in graphs_within(graph_module) for node in inner.graph.nodes]
    calls = [(inner, node) for inner, node in nodes if isinstance(node.target, HigherOrderOperator)]
    transforms = any(begins_transform(node.target) for _, node in nodes)
    for inner, call in calls:
        if call.target is torch.ops.higher_order.tag_activation_checkpoint:
            continue
        is_function = call.target is torch.ops.higher_order.autograd_function_apply
        name = "an autograd.Function" if is_function else str(call.target)
        if transforms or not is_function or not _can_run_again(inner, call):
            raise GraphBreak(f"the model takes second derivatives through {name}, which a captured graph would lose")
        forward, backward, *arguments = call.args
        for node in _grad_modes(_body(inner, backward)):
            node.graph.erase_node(node)
        _body(inner, backward).recompile()
        call.target = custom_function
        call.args = (forward, backward, call.kwargs["non_differentiable_idx"], *arguments)
        call.kwargs = {}
    for inner in {inner for inner, _ in calls}:
        inner.recompile()


def _body(inner: fx.GraphModule, node: Any) -> Any:
    """The graph module that a `get_attr` node of the graph module `inner` reads."""
    return inner.get_submodule(str(node.target))


def _grad_modes(body: fx.GraphModule) -> list[fx.Node]:
    return [node for node in body.graph.nodes if node.target is SETS_GRAD_MODE]


def _can_run_again(inner: fx.GraphModule, call: fx.Node) -> bool:
    """Whether an `autograd.Function` writes to none of its inputs, and its backward sets the grad mode only around all
    of it, as Dynamo does."""
    if "saved_for_backward_idx" not in call.kwargs or call.kwargs.get("dirty_idx"):
        return False
    modes = [node.args[0] for node in _grad_modes(_body(inner, call.args[1]))]
    return modes in ([], [False, True])

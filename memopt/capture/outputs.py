"""The outputs of a captured region: which of them are differentiated, and which forwards wait for their backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from memopt.compat.autograd import keeps_graph, note_reached
from memopt.errors import UnplannedGradientError
from passes import copy_graph_module


def detach_all_but_scalars(graph_module: fx.GraphModule) -> frozenset[int]:
    """Detach the outputs that are not scalars, provided that a scalar (the loss) is among the differentiable outputs.

    Otherwise autograd would materialise a zero gradient for each of them (the logits of a language model, every key and
    value of its cache) and the graph would carry it through the backward. Edits the graph; returns the positions of the
    detached outputs. A gradient that does arrive at one of them is an error: see `hand_out`.
    """
    output = graph_module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    differentiable = {
        position: node
        for position, node in enumerate(results)
        if isinstance(node, fx.Node) and _requires_grad(node.meta.get("example_value"))
    }
    large = {position: node for position, node in differentiable.items() if node.meta["example_value"].dim() > 0}
    if len(large) == len(differentiable):
        return frozenset()
    with graph_module.graph.inserting_before(output):
        detached = {position: graph_module.graph.call_method("detach", (node,)) for position, node in large.items()}
    output.args = (tuple(detached.get(position, node) for position, node in enumerate(results)),)
    graph_module.recompile()
    return frozenset(large)


def keeping_dtypes(graph_module: fx.GraphModule, dtypes: Sequence[torch.dtype | None]) -> fx.GraphModule:
    """A copy of a graph which casts its outputs to these dtypes, for where it runs under autocast; None is for any.

    They go to code that runs as its author wrote it: outside of autocast, most operators refuse operands of two dtypes,
    and losses sum in the dtype of their input.
    """
    copied = copy_graph_module(graph_module)
    output = copied.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    with copied.graph.inserting_before(output):
        cast: dict[fx.Node, fx.Node] = {}
        for number, (node, dtype) in enumerate(zip(results, dtypes, strict=True)):
            if dtype is not None and node.op != "placeholder":
                if node not in cast:
                    cast[node] = copied.graph.call_method("to", (node, dtype))
                    cast[node].meta.update(node.meta)
                results[number] = cast[node]
    output.args = (tuple(results),)
    copied.recompile()
    return copied


def example_of(result: Any) -> torch.Tensor | None:
    """The fake tensor that Dynamo traced a region's result with, detached or not; None where it is no tensor."""
    if not isinstance(result, fx.Node):
        return None
    node = result if "example_value" in result.meta else next(iter(result.args), None)
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class Awaited(Protocol):
    """A forward whose backward has not run yet."""

    def before_backward(self, leaves: Sequence[torch.Tensor], gradients: Sequence[object] = ()) -> None:
        """Called before the backward of a region with these leaves runs from these gradients; it raises to prevent
        it."""

    def after_backward(self) -> None:
        """Called when the forward's saved values are no longer needed."""


def hand_out(outputs: Sequence[Any], undifferentiated: frozenset[int], forward: Awaited) -> tuple[Any, ...]:
    """Return a region's outputs to its caller, such that `forward` is told of their backward.

    An output in `undifferentiated` requires a gradient, as in the plain model, but its backward raises
    `UnplannedGradientError`.
    """
    handled = [
        position
        for position, value in enumerate(outputs)
        if isinstance(value, torch.Tensor) and (value.requires_grad or position in undifferentiated)
    ]
    refusing = tuple(position in undifferentiated for position in handled)
    if all(refusing):
        return tuple(outputs)
    hand_out_all: Any = _HandOut.apply
    handed = iter(hand_out_all(forward, refusing, *(outputs[position] for position in handled)))
    return tuple(next(handed) if position in handled else value for position, value in enumerate(outputs))


class _HandOut(torch.autograd.Function):
    """The identity between a region's outputs and the caller's autograd graph."""

    @staticmethod
    def forward(ctx: Any, forward: Awaited, refusing: tuple[bool, ...], *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.forward, ctx.refusing = forward, refusing
        ctx.shapes = [tuple(value.shape) for value in values]
        # Detached, because autograd takes returned inputs for views and forbids `loss /= steps` on them.
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for gradient, refused, shape in zip(gradients, ctx.refusing, ctx.shapes, strict=True):
            if refused and gradient is not None:
                raise UnplannedGradientError(
                    f"a gradient flows into an output of shape {shape}, but the plan differentiates only the loss; "
                    "optimise with outputs='all' to plan for the gradients of all outputs"
                )
        if torch.is_grad_enabled():
            raise UnplannedGradientError(
                "create_graph=True asks for gradients of gradients, which a captured backward does not have; call "
                "memopt.remove(model) to differentiate twice"
            )
        note_reached([one for one in zip(ctx.next_functions, gradients, strict=True) if one[0][0] is not None])
        ctx.forward.before_backward(_leaves_behind(ctx), gradients)
        if not keeps_graph():
            ctx.forward.after_backward()
        passed = (None if refused else gradient for gradient, refused in zip(gradients, ctx.refusing, strict=True))
        return None, None, *passed


def _leaves_behind(hand_out: Any) -> list[torch.Tensor]:
    """The leaf tensors that the regions behind these outputs read."""
    regions = {edge for edge, _ in hand_out.next_functions if edge is not None}
    edges = [edge for region in regions for edge, _ in region.next_functions]
    return [edge.variable for edge in edges if hasattr(edge, "variable")]

"""The outputs of a captured region: which of them are differentiated, and what holds memory until they are."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memopt.errors import UnplannedGradientError
from memopt.torch_compat import keeps_graph


def detach_all_but_scalars(graph_module: fx.GraphModule) -> frozenset[int]:
    """Take the outputs that are not scalars out of differentiation, where a scalar (the loss) is among them.

    Autograd would otherwise materialise a zero gradient as large as each (the logits of a language model, every key
    and value of its cache) and the graph would carry them through the backward. Edits the graph; returns the positions
    of the outputs concerned. A gradient that does come to them is an error: see `hand_out`.
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


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@dataclass(eq=False)
class PendingForward:
    """A forward whose backward is still to come: what it holds, and the peak that its backward will reach."""

    held_bytes: int
    peak_bytes: int
    done: bool = False


@dataclass
class PendingForwards:
    """The forwards of a model that wait for their backward; one that is dropped leaves by itself."""

    _alive: weakref.WeakSet[PendingForward] = field(default_factory=weakref.WeakSet)

    def waiting(self) -> list[PendingForward]:
        return [forward for forward in self._alive if not forward.done]

    def begin(self, held_bytes: int, peak_bytes: int) -> PendingForward:
        forward = PendingForward(held_bytes, peak_bytes)
        self._alive.add(forward)
        return forward


def hand_out(outputs: Sequence[Any], undifferentiated: frozenset[int], forward: PendingForward) -> tuple[Any, ...]:
    """Give a region's outputs to its caller, tied to `forward` until their backward has run.

    An output in `undifferentiated` requires a gradient, as in the plain model, and refuses one when it comes.
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
    """The identity, placed where a region's outputs meet the caller's graph."""

    @staticmethod
    def forward(ctx: Any, forward: PendingForward, refusing: tuple[bool, ...], *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.forward, ctx.refusing = forward, refusing
        ctx.shapes = [tuple(value.shape) for value in values]
        # Detached, not returned as they are: autograd would call them views and forbid `loss /= steps`.
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for gradient, refused, shape in zip(gradients, ctx.refusing, ctx.shapes, strict=True):
            if refused and gradient is not None:
                raise UnplannedGradientError(
                    f"a gradient flows into an output of shape {shape}, but the plan differentiates only the loss; "
                    "optimise with outputs='all' to plan for the gradients of all outputs"
                )
        if not keeps_graph():
            ctx.forward.done = True
        passed = (None if refused else gradient for gradient, refused in zip(gradients, ctx.refusing, strict=True))
        return None, None, *passed

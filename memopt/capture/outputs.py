"""The outputs of a captured region: which of them are differentiated, and how a forward that waits learns of its
backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx, nn

from memopt.capture.inner_outputs import GradientSource, InnerOutputs
from memopt.compat.autograd import is_batched, keeps_graph, note_reached
from memopt.errors import UnplannedGradientError


def detach_all_but_loss(graph_module: fx.GraphModule) -> frozenset[int]:
    """Detach the outputs that are not scalars, if the differentiable scalar outputs are the loss: if they depend on
    every parameter that another output depends on. Edits the graph; returns the positions of the detached outputs.

    Without this, autograd would make a zero gradient for each such output (the logits of a language model, the keys and
    values of its cache), and the graph would carry it through the backward. Scalars that do not depend on all of these
    parameters (a learned temperature, a commitment loss, a balance between experts) are a part of a loss that the
    caller computes: then no output is detached. If a gradient does arrive at a detached output, a second forward
    computes the gradients that follow from it (`hand_out`)."""
    output = graph_module.graph.output_node()
    results = output.args[0]
    assert isinstance(results, (tuple, list))
    differentiable = {
        position: node
        for position, node in enumerate(results)
        if isinstance(node, fx.Node) and _requires_grad(node.meta.get("example_value"))
    }
    large = {position: node for position, node in differentiable.items() if node.meta["example_value"].dim() > 0}
    scalars = [node for position, node in differentiable.items() if position not in large]
    if not _computed_from(large.values()) <= _computed_from(scalars):
        return frozenset()
    with graph_module.graph.inserting_before(output):
        detached = {position: graph_module.graph.call_method("detach", (node,)) for position, node in large.items()}
    output.args = (tuple(detached.get(position, node) for position, node in enumerate(results)),)
    graph_module.recompile()
    return frozenset(large)


def _computed_from(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The parameters, frozen ones too, and the other differentiable inputs that nodes are computed from."""
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    inputs = ((node, node.meta.get("example_value")) for node in seen if node.op == "placeholder")
    return {node for node, value in inputs if isinstance(value, nn.Parameter) or _requires_grad(value)}


def example_of(result: Any) -> torch.Tensor | None:
    """The fake tensor that Dynamo traced for `result`, or for the value that it detaches; None where there is none."""
    if not isinstance(result, fx.Node):
        return None
    node = result if "example_value" in result.meta else next(iter(result.args), None)
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Awaited(Protocol):
    """A forward whose backward has not run yet."""

    def before_backward(self, leaves: Sequence[torch.Tensor], gradients: Sequence[object] = ()) -> None:
        """Called before the backward of a region that reads these leaves runs from these gradients of its outputs; may
        raise to prevent it."""

    def after_backward(self) -> None:
        """Called when the forward's saved values are no longer needed."""


class _Replays(GradientSource, Protocol):
    """A second forward of a region. It gives the gradients that follow from outputs which the region does not
    differentiate, gradients that are to be differentiated, and the gradients of inner outputs
    (`memopt.capture.inner_outputs`)."""

    @property
    def leaves(self) -> Sequence[torch.Tensor]:
        """The region's inputs that require gradients; empty where there is no second forward."""

    def gradients(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """The gradients of `leaves`, in their order. `of` holds gradients of outputs, by the positions of these. Raises
        `UnplannedGradientError` where no second forward gives them."""

    def derivatives(self, of: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """As `gradients`, for the outputs that the region differentiates too, in a backward that is to be
        differentiated: the gradients have an autograd graph. That backward passes over the region."""

    def release(self) -> None:
        """Free what it needs: the forward's backward has run."""


def hand_out(
    outputs: Sequence[Any],
    forward: _Awaited,
    replay: _Replays | None = None,
    others: Collection[int] = (),
    feeds: Mapping[int, frozenset[int]] | None = None,
) -> tuple[Any, ...]:
    """Return a region's outputs to its caller, so that `forward` is notified when their backward begins.

    Outputs at the positions in `others`, which the region does not differentiate, require a gradient as in the plain
    model; if a gradient arrives at one, `replay` computes the gradients that follow from it. `feeds` is the result of
    `feeding`: where the gradient of an inner output in it is read, `replay` computes the part that the captured
    backward lacks. Without `replay`, neither is possible, nor a backward with `create_graph=True`.
    """
    handed = list(outputs)
    handled = [
        position for position, value in enumerate(outputs) if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    leaves = () if replay is None else replay.leaves
    if handled:
        hand_out_all: Any = _HandOut.apply
        values = hand_out_all(forward, replay, handled, *[outputs[position] for position in handled], *leaves)
        for position, value in zip(handled, values, strict=True):
            handed[position] = value
    if others:
        beside: Any = _Replayed.apply
        positions = sorted(others)
        leaves = leaves or [outputs[position] for position in handled[:1]]  # by which they require a gradient
        values = beside(replay, positions, *[outputs[position] for position in positions], *leaves)
        for position, value in zip(positions, values, strict=True):
            handed[position] = value
    if feeds and replay is not None:
        inner = InnerOutputs(handed, feeds, replay)
        nodes: set[Any] = {value.grad_fn for value in handed if isinstance(value, torch.Tensor)} - {None}
        for node in nodes:
            node.inner = inner
    return tuple(handed)


class _HandOut(torch.autograd.Function):
    """The identity between a region's outputs and the caller's autograd graph, which goes on from it to the region and,
    for gradients that are to be differentiated, past the region to the leaves of the second forward."""

    @staticmethod
    def forward(
        ctx: Any, forward: _Awaited, replay: _Replays | None, positions: Sequence[int], *values: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.forward, ctx.replay, ctx.positions = forward, replay, positions
        ctx.past = (None,) * (len(values) - len(positions))
        # Detached, because autograd takes returned inputs for views and forbids `loss /= steps` on them.
        return tuple([value.detach() for value in values[: len(positions)]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _check_one_by_one(gradients)
        gradients = _through_hooks(ctx, gradients)
        if torch.is_grad_enabled():
            return None, None, None, *(None for _ in gradients), *_derivatives(ctx, gradients)
        edges = ctx.next_functions[: len(gradients)]
        note_reached([one for one in zip(edges, gradients, strict=True) if one[0][0] is not None])
        if ctx.forward is None:  # torch refuses a second backward of what its first one has freed
            return None, None, None, *gradients, *ctx.past
        ctx.forward.before_backward(_leaves_behind(ctx), gradients)
        if not keeps_graph():
            ctx.forward.after_backward()
            # A model that keeps an output keeps this node, which must not keep the model.
            ctx.forward = ctx.inner = None
            if ctx.replay is not None:  # its own backward, if this one has come to it, is over: it began later
                ctx.replay.release()
        return None, None, None, *gradients, *ctx.past


class _Replayed(torch.autograd.Function):
    """The identity on outputs that a region does not differentiate; made after `_HandOut`, so that a backward through
    both comes to this one first."""

    @staticmethod
    def forward(ctx: Any, replay: _Replays, positions: Sequence[int], *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.positions, ctx.others = replay, positions, len(values) - len(positions)
        return tuple([value.detach() for value in values[: len(positions)]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _check_one_by_one(gradients)
        gradients = _through_hooks(ctx, gradients)
        if torch.is_grad_enabled():
            found = _derivatives(ctx, gradients)
        else:
            given = _given(ctx, gradients)
            found = ctx.replay.gradients(given) if given else [None] * ctx.others
        return None, None, *(None for _ in ctx.positions), *found


def _given(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
    """The gradients that have arrived, by the positions of their outputs."""
    return {at: one for at, one in zip(ctx.positions, gradients, strict=True) if one is not None}


def _derivatives(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """The gradients of the leaves in a backward that is to be differentiated. Raises `UnplannedGradientError` where no
    second forward gives them."""
    if ctx.replay is None:
        raise UnplannedGradientError(f"{DIFFERENTIATED}; {TAKEN_WITHIN}")
    return ctx.replay.derivatives(_given(ctx, gradients))


DIFFERENTIATED = "create_graph=True asks for gradients of gradients, which a captured backward does not have"
TAKEN_WITHIN = (
    "have a loss_fn of (model, batch) take the derivative and give it to optimize, or call memopt.remove(model)"
)


def _check_one_by_one(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise `UnplannedGradientError` in a backward that torch.func.vmap runs."""
    if any(map(is_batched, gradients)):
        raise UnplannedGradientError(
            "a captured backward does not run for several gradients at once (is_grads_batched=True, vectorize=True, "
            "torch.func.vmap); ask for one after the other, or call memopt.remove(model)"
        )


def _through_hooks(ctx: Any, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients as the hooks of inner outputs leave them."""
    inner = getattr(ctx, "inner", None)
    return gradients if inner is None else inner.arrived(ctx, gradients)


def _leaves_behind(hand_out: Any) -> list[torch.Tensor]:
    """The leaf tensors that regions read whose outputs the autograd node `hand_out`, one of `_HandOut`, has handed
    out."""
    regions = {edge for edge, _ in hand_out.next_functions[: len(hand_out.positions)] if edge is not None}
    edges = [edge for region in regions for edge, _ in region.next_functions]
    return [edge.variable for edge in edges if hasattr(edge, "variable")]

"""The bytes that eager code between captured regions holds: no region's plan has them, and the budget must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from memopt.device.live_bytes import LiveBytes


class Between(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that operators make on fake tensors, except in `planned()` blocks."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: Dynamo captures nothing while a mode of another kind is active."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._planned = 0

    @contextmanager
    def planned(self) -> Iterator[None]:
        """A block whose operators make storages that a region's plan accounts for; they are not counted here."""
        self._planned += 1
        try:
            yield
        finally:
            self._planned -= 1

    def count(self, tensors: Any) -> None:
        """Count the new storages of these tensors, or leave them out inside of a `planned()` block."""
        if self._planned:
            self.exclude(tensors)
        else:
            super().count(tensors)


def stand_in(region: fx.GraphModule, between: Between, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run a region on fakes as one opaque autograd function; what its forward and backward make is not counted."""
    run: Any = _StandIn.apply
    return run(region, between, *arguments)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: fx.GraphModule, between: Between, *arguments: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.between = between
        # Leaves get no gradient: autograd would copy it into `.grad`, since Python code holds it too.
        with between.planned():
            ctx.likes = [
                (torch.empty_like(argument, device="meta"), argument.device)
                if isinstance(argument, torch.Tensor) and argument.requires_grad and not argument.is_leaf
                else None
                for argument in arguments
            ]
            outputs = region.forward(*arguments)
            # Detached, because autograd takes an output that is an input for one that was written over.
            results = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in outputs)
            # An output without a gradient in the model has none here either: later regions are captured as they run.
            ctx.mark_non_differentiable(*(results[position] for position in _undifferentiated(region)))
            return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.between.planned():
            made = (like and torch.empty_like(like[0], device=like[1]) for like in ctx.likes)
            return None, None, *made


def _undifferentiated(region: fx.GraphModule) -> list[int]:
    """The positions of a region's results that are tensors and require no gradient in Dynamo's graph."""
    (results,) = region.graph.output_node().args
    known = [node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in results]  # type: ignore[union-attr]
    return [at for at, value in enumerate(known) if isinstance(value, torch.Tensor) and not value.requires_grad]

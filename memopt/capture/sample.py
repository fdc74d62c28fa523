"""Runs the forward of a training call on real values, region by region on operator graphs, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from memopt.capture.author_modes import Untraceable
from memopt.capture.between import undifferentiated
from memopt.capture.derivatives import forward_of
from memopt.capture.dynamo import CallStopped, GraphBreak, compile_call, training_call
from memopt.capture.inputs import Call, tensors_in
from memopt.capture.operators import OperatorGraph, Rewriting
from memopt.capture.region import RecordedRegion
from memopt.saved_values import values_restored
from memopt.training_state import containers_restored, undone

RunRegion: TypeAlias = Callable[[OperatorGraph, Sequence[Any]], Sequence[Any]]
"""Runs a region's operator graph on real inputs and returns its outputs."""


def run_sample(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    run_region: RunRegion,
    rewriting: Rewriting,
    *,
    differentiate_all: bool,
) -> None:
    """Run the forward of a training call, with `run_region(graph, inputs)` in place of every region that has an
    operator graph, in order. `rewriting` names the device to trace for; `differentiate_all` is as for
    `RecordedRegion.record`.

    The operator graphs are those that planning captures for the same call; other code runs as it is. Buffers, random
    generators, inputs and module attributes are restored afterwards. Raises what the model and `run_region` raise, and
    `CaptureError` where the forward cannot be captured."""
    sample = _Sample(run_region, rewriting, differentiate_all=differentiate_all)
    args, kwargs = call
    with undone(model), values_restored(tensors_in(call)), containers_restored(call):
        try:
            compile_call(training_call(model, loss_fn), sample.whole, whole=True)(*args, **kwargs)
        except CallStopped:
            return
        except GraphBreak:
            pass
        compile_call(training_call(model, loss_fn), sample.region, whole=False)(*args, **kwargs)


class _Sample:
    """Dynamo backends that run each region with `run_region` instead of compiling it."""

    def __init__(self, run_region: RunRegion, rewriting: Rewriting, *, differentiate_all: bool) -> None:
        self.run_region, self.rewriting, self.differentiate_all = run_region, rewriting, differentiate_all

    def whole(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend for Dynamo, for calls that are to be one graph: runs the graph while it is compiled and raises
        `CallStopped`, so that the rest of the model's Python code does not run."""
        run = self._runner(graph_module, inputs, differentiate_all=self.differentiate_all)
        if run is not None:
            run(*inputs)
        raise CallStopped

    def region(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend for one region of several: its outputs require gradients as in the model, but have no
        backward."""
        run = self._runner(graph_module, inputs, differentiate_all=True) or forward_of(graph_module)
        stand_in: Any = _StandIn.apply
        return partial(stand_in, run, undifferentiated(graph_module))

    def _runner(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], *, differentiate_all: bool
    ) -> Callable[..., Any] | None:
        """A function that runs a region's operator graph; None where it has none."""
        region = RecordedRegion.record(graph_module, inputs, differentiate_all=differentiate_all)
        if not torch.is_grad_enabled():
            return None
        try:
            graph = region.operator_graph(self.rewriting.planned_for)
        except Untraceable:
            return None
        return lambda *args: self.run_region(graph, args)


class _StandIn(torch.autograd.Function):
    """Runs a region without gradients; its outputs require gradients where the model's do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], constant: Sequence[int], *arguments: Any) -> Any:
        # Detached, because autograd takes an output that is an input for one that was written over.
        results = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in run(*arguments))
        ctx.mark_non_differentiable(*(results[position] for position in constant))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("the forward runs without a backward here: nothing may take gradients of its outputs")

"""Captures a training call ahead of its first run, on fakes: nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.between import Between, stand_in
from memopt.capture.dynamo import (
    GraphBreak,
    compile_call,
    in_brief,
    lower,
    parameter_numbers,
    training_call,
)
from memopt.capture.fake_model import fake_parameters
from memopt.capture.inputs import Call, fake_call
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NOTHING, Rewriting
from memopt.capture.outputs import detach_all_but_scalars
from memopt.errors import CaptureError
from memopt.torch_compat import FakeTensorMode, new_fake_mode, tree_leaves

PASSED_OVER = "torch.compile passes it over"


@dataclass(frozen=True)
class CapturedCall:
    """What one training call runs, in the order of the forward."""

    regions: tuple[JointGraph, ...]
    """One for every *run* of a region: a block that is compiled once and called often is here as often."""
    between_bytes: int = 0
    """The most that the eager code between the regions holds at once."""
    notes: tuple[str, ...] = ()


class _Recorded(Exception):
    """The joint graph is there: tracing need not go on."""


def capture(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    device: torch.device,
    hooked: frozenset[int],
    *,
    differentiate_all: bool,
    rewriting: Rewriting = NOTHING,
) -> CapturedCall:
    """The joint graphs of every region of one training call.

    `hooked` holds the `id`s of parameters whose gradients hooks wait for; what `rewriting` decides is done to each
    region's operator graph. Where the forward breaks into regions, its Python runs once, on fakes. Raises
    `CaptureError` where no region can be captured.
    """
    mode = new_fake_mode()
    with fake_parameters(model, mode, device) as fakes:
        hooked_fakes = {id(fake) for real, fake in fakes.items() if id(real) in hooked}
        args, kwargs = fake_call(call, mode, device)
        recorder = _Recorder(hooked_fakes, rewriting, differentiate_all=differentiate_all)
        try:
            compile_call(training_call(model, loss_fn), recorder.whole, whole=True)(*args, **kwargs)
            reason = "what it returns depends on no trainable parameter" if recorder.undifferentiated else PASSED_OVER
        except _Recorded:
            return CapturedCall(tuple(recorder.runs))
        except GraphBreak as broken:
            reason = str(broken)
        return _capture_regions(model, (args, kwargs), loss_fn, mode, hooked_fakes, rewriting, reason)


def _capture_regions(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    mode: FakeTensorMode,
    hooked: set[int],
    rewriting: Rewriting,
    reason: str,
) -> CapturedCall:
    recorder = _Recorder(hooked, rewriting, differentiate_all=True)
    try:
        with mode, recorder.between:
            compiled = compile_call(training_call(model, loss_fn), recorder.region, whole=False)
            recorder.differentiate(compiled(*call[0], **call[1]))
    except Exception as failure:
        further = in_brief(failure)
        both = reason if further == reason else f"{reason}; running past it on fakes failed: {further}"
        raise CaptureError(_cannot(model, both)) from failure
    if not recorder.runs:
        raise CaptureError(_cannot(model, reason))
    note = f"captured in {len(recorder.runs)} regions, since {reason}; what runs between them is not planned"
    return CapturedCall(recorder.unshared_runs(), recorder.between.peak_bytes, (note,))


def _cannot(model: nn.Module, reason: str) -> str:
    return (
        f"the forward of {type(model).__name__} cannot be captured as a graph: {reason}; mend the model there, or add "
        "'plain' to allow to run it unplanned"
    )


class _Recorder:
    """Backends that write down what they are given to compile."""

    def __init__(self, hooked: set[int], rewriting: Rewriting, *, differentiate_all: bool) -> None:
        self.hooked, self.rewriting, self.differentiate_all = hooked, rewriting, differentiate_all
        self.between = Between()
        self.runs: list[JointGraph] = []
        self.parameters: list[dict[int, int]] = []
        """For each run its parameters: number of the input → `id`."""
        self.undifferentiated = False

    def whole(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend for a call that is one region: stops at its joint graph."""
        if not self.differentiate_all:
            detach_all_but_scalars(graph_module)
        joint = self.trace(graph_module, inputs)
        if joint is None:
            self.undifferentiated = True
            return graph_module.forward
        self.runs.append(joint)
        raise _Recorded

    def region(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend for one of several regions: writes down each run of it, and goes on."""
        with self.between.planned():
            joint = self.trace(graph_module, inputs)
        if joint is None:
            return graph_module.forward

        def run(*args: Any) -> Any:
            self.runs.append(replace(joint, parameter_inputs=parameter_numbers(args, self.hooked)))
            self.parameters.append({number: id(args[number]) for number in parameter_numbers(args, ())})
            return stand_in(graph_module, self.between, args)

        return run

    def trace(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> JointGraph | None:
        """The joint graph; None for a region without gradients."""
        traced: list[JointGraph] = []

        def keep(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            traced.append(joint)
            raise _Recorded

        try:
            lower(graph_module, inputs, parameter_numbers(inputs, self.hooked), keep, self.rewriting)
        except _Recorded:
            return traced[0]
        return None

    def differentiate(self, outputs: Any) -> None:
        """Run the backward of what was returned: eager code holds memory there too."""
        roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        scalars = [root for root in roots if root.dim() == 0] or roots
        with self.between.planned():
            gradients = [torch.ones_like(scalar) for scalar in scalars]
        torch.autograd.backward(scalars, gradients)

    def unshared_runs(self) -> tuple[JointGraph, ...]:
        """The runs, without the parameters that several of them read: autograd sums their gradients before it adds
        them to `.grad`, so no run may add its own."""
        readers = Counter(parameter for parameters in self.parameters for parameter in parameters.values())
        return tuple(
            replace(run, parameter_inputs=frozenset(n for n in run.parameter_inputs if readers[parameters[n]] == 1))
            for run, parameters in zip(self.runs, self.parameters, strict=True)
        )

"""Captures a training call ahead of its first run, on fakes: nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
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
from memopt.capture.fake_model import Narrowed, fake_parameters
from memopt.capture.inputs import Call, fake_call
from memopt.capture.joint import JointGraph
from memopt.capture.operators import NothingToRewrite, Operators, Rewriting
from memopt.capture.outputs import detach_all_but_scalars
from memopt.compat import FakeTensorMode, capture_settings, new_fake_mode, tracing_again, tree_leaves
from memopt.emit import ATEN, Lowering
from memopt.errors import CaptureError

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


@dataclass(frozen=True)
class Capture:
    """A training call whose joint graphs are traced when they are asked for."""

    trace: Callable[[Rewriting], CapturedCall]
    """The joint graphs by what is done to the operator graphs. Raises `CaptureError`, `NothingToRewrite`."""
    graph: fx.GraphModule | None
    """What Dynamo made of a call that is one region."""


def capture(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    device: torch.device,
    hooked: frozenset[int],
    *,
    differentiate_all: bool,
    narrowed: Narrowed | None = None,
    lowering: Lowering = ATEN,
) -> Capture:
    """Capture one training call; its joint graphs are traced when they are asked for, with one rewriting or another.

    `hooked` holds the `id`s of parameters whose gradients hooks wait for; `narrowed` has parameters and inputs captured
    in another dtype than they have. A call that is one region is captured once.
    Where the forward breaks into regions, its Python runs once, on fakes, for each rewriting.
    """
    mode = new_fake_mode()
    whole: list[_Whole] = []
    floats = narrowed.dtype if narrowed else None

    def keep(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not differentiate_all:
            detach_all_but_scalars(graph_module)
        whole.append(_Whole(graph_module, inputs, hooked_fakes, tracing_again(), lowering))
        raise _Recorded

    with fake_parameters(model, mode, device, narrowed) as fakes:
        hooked_fakes = {id(fake) for real, fake in fakes.items() if id(real) in hooked}
        args, kwargs = fake_call(call, mode, device)
        reason = PASSED_OVER
        try:
            compile_call(training_call(model, loss_fn, floats), keep, whole=True)(*args, **kwargs)
        except _Recorded:
            pass
        except GraphBreak as broken:
            reason = str(broken)

    def in_regions(rewriting: Rewriting) -> CapturedCall:
        with fake_parameters(model, mode, device, narrowed) as fakes:
            hooked_fakes = {id(fake) for real, fake in fakes.items() if id(real) in hooked}
            run = training_call(model, loss_fn, floats)
            return _capture_regions(model, (args, kwargs), run, mode, hooked_fakes, rewriting, reason)

    def as_one(rewriting: Rewriting) -> CapturedCall:
        joint = whole[0].trace(rewriting)
        if joint is None:
            raise CaptureError(_cannot(model, "what it returns depends on no trainable parameter"))
        return CapturedCall((joint,))

    return Capture(as_one, whole[0].graph_module) if whole else Capture(in_regions, None)


@dataclass(frozen=True)
class _Whole:
    """A call that is one region, as Dynamo gave it."""

    graph_module: fx.GraphModule
    inputs: Sequence[Any]
    hooked: set[int]
    again: Callable[[], AbstractContextManager[Any]]
    lowering: Lowering

    def trace(self, rewriting: Rewriting) -> JointGraph | None:
        with self.again(), capture_settings():
            return _trace(self.graph_module, self.inputs, self.hooked, rewriting, self.lowering)


def _trace(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    hooked: set[int],
    rewriting: Rewriting,
    lowering: Lowering = ATEN,
) -> JointGraph | None:
    """The joint graph of a region; None for one without gradients."""
    traced: list[JointGraph] = []

    def keep(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        traced.append(joint)
        raise _Recorded

    try:
        lower(graph_module, inputs, parameter_numbers(inputs, hooked), keep, rewriting, lowering)
    except _Recorded:
        return traced[0]
    return None


def _capture_regions(
    model: nn.Module,
    call: Call,
    run: Callable[..., Any],
    mode: FakeTensorMode,
    hooked: set[int],
    rewriting: Rewriting,
    reason: str,
) -> CapturedCall:
    recorder = _Recorder(hooked, replace(rewriting, needed=""))
    try:
        with mode, recorder.between:
            compiled = compile_call(run, recorder.region, whole=False)
            recorder.differentiate(compiled(*call[0], **call[1]))
    except Exception as failure:
        further = in_brief(failure)
        both = reason if further == reason else f"{reason}; running past it on fakes failed: {further}"
        raise CaptureError(_cannot(model, both)) from failure
    if not recorder.runs:
        raise CaptureError(_cannot(model, reason))
    _check_needed(recorder.runs, rewriting.needed)
    note = f"captured in {len(recorder.runs)} regions, since {reason}; what runs between them is not planned"
    return CapturedCall(recorder.unshared_runs(), recorder.between.peak_bytes, (note,))


def _check_needed(runs: Sequence[JointGraph], label: str) -> None:
    """Raise `NothingToRewrite` if in no region what is needed found anything to do."""
    nothing: list[NothingToRewrite] = []
    for run in runs:
        try:
            (run.operators or Operators()).check_needed(label)
        except NothingToRewrite as found:
            nothing.append(found)
    if len(nothing) == len(runs):
        raise nothing[0]


def _cannot(model: nn.Module, reason: str) -> str:
    return (
        f"the forward of {type(model).__name__} cannot be captured as a graph: {reason}; mend the model there, or add "
        "'plain' to allow to run it unplanned"
    )


class _Recorder:
    """A backend that writes down the regions that it is given to compile, and their runs."""

    def __init__(self, hooked: set[int], rewriting: Rewriting) -> None:
        self.hooked, self.rewriting = hooked, rewriting
        self.between = Between()
        self.runs: list[JointGraph] = []
        self.parameters: list[dict[int, int]] = []
        """For each run its parameters: number of the input → `id`."""

    def region(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend for one of several regions: writes down each run of it, and goes on."""
        with self.between.planned():
            joint = _trace(graph_module, inputs, self.hooked, self.rewriting)
        if joint is None:
            return graph_module.forward

        def run(*args: Any) -> Any:
            self.runs.append(replace(joint, parameter_inputs=parameter_numbers(args, self.hooked)))
            self.parameters.append({number: id(args[number]) for number in parameter_numbers(args, ())})
            return stand_in(graph_module, self.between, args)

        return run

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

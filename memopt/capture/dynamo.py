"""Captures a training call with Dynamo and AOTAutograd."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.fake_model import fake_parameters
from memopt.capture.inputs import Call, fake_call
from memopt.capture.joint import JointGraph
from memopt.capture.outputs import detach_all_but_scalars
from memopt.errors import CaptureError
from memopt.torch_compat import (
    BackendCompilerFailed,
    Unsupported,
    aot_autograd,
    boxed,
    capture_settings,
    new_fake_mode,
)

Backend = Callable[[fx.GraphModule, Sequence[Any]], Any]
Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]

_numbers = itertools.count()


def training_call(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that is captured: the model's own call, hooks included, or its loss on `(inputs, targets)`.

    It has a code object of its own, since Dynamo keeps and counts compilations by code object.
    """
    run: Any = model._call_impl  # not the model itself, whose call is memopt's by now

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def loss(inputs: Any, targets: Any) -> Any:
        assert loss_fn is not None
        if isinstance(inputs, dict):
            return loss_fn(run(**inputs), targets)
        return loss_fn(run(*inputs) if isinstance(inputs, (tuple, list)) else run(inputs), targets)

    call = forward if loss_fn is None else loss
    call.__code__ = call.__code__.replace(co_name=f"training_call_{next(_numbers)}")
    return call


def compile_call(call: Callable[..., Any], backend: Backend, *, whole: bool) -> Callable[..., Any]:
    """`call`, compiled region by region by `backend`; `whole`: as one region or not at all (`CaptureError`)."""
    compiled = torch.compile(call, backend=backend, dynamic=False, fullgraph=whole)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with capture_settings():
                return compiled(*args, **kwargs)
        except BackendCompilerFailed as failure:
            cause = getattr(failure, "inner_exception", None) or failure.__cause__ or failure
            raise cause from None
        except Unsupported as failure:
            raise GraphBreak(first_line(failure)) from failure

    return run


class GraphBreak(CaptureError):
    """The call cannot be captured as one graph."""


def first_line(error: BaseException) -> str:
    """What an error says, without torch's advice on debugging."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def lower(graph_module: fx.GraphModule, inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """Trace a captured region's joint graph, have it cut by `partition`, and make both halves callable."""

    def partition_traced(
        traced: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(JointGraph.of(traced, num_fwd_outputs, parameter_numbers(inputs)))

    def compiler(module: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        return boxed(module)

    compile_region = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition_traced,
        keep_inference_input_mutations=True,
    )
    return compile_region(graph_module, list(inputs))


def parameter_numbers(inputs: Sequence[Any]) -> frozenset[int]:
    """Which of a region's inputs are parameters."""
    return frozenset(number for number, value in enumerate(inputs) if isinstance(value, nn.Parameter))


class _Recorded(Exception):
    """The joint graph is there: tracing need not go on."""


def capture(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    device: torch.device,
    *,
    differentiate_all: bool,
) -> tuple[tuple[JointGraph, ...], tuple[str, ...]]:
    """The joint graphs of every region of one training call, found on fakes: nothing is allocated, nothing runs.

    Returns the regions in the order of their forwards, and notes on what was not captured. Raises `CaptureError` where
    no region could be captured.
    """
    mode = new_fake_mode()
    regions: list[JointGraph] = []

    def keep(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        regions.append(joint)
        raise _Recorded

    def record(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        if not differentiate_all:
            detach_all_but_scalars(graph_module)
        lower(graph_module, inputs, keep)

    def record_and_go_on(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with contextlib.suppress(_Recorded):
            record(graph_module, inputs)
        return graph_module.forward

    with fake_parameters(model, mode, device):
        arguments, keywords = fake_call(call, mode, device)
        try:
            compile_call(training_call(model, loss_fn), record, whole=True)(*arguments, **keywords)
            reason = "Dynamo passed it over"
        except _Recorded:
            return tuple(regions), ()
        except GraphBreak as broken:
            reason = str(broken)
        try:
            with mode:
                compile_call(training_call(model, loss_fn), record_and_go_on, whole=False)(*arguments, **keywords)
        except Exception as failure:
            raise CaptureError(
                f"{_cannot(model, reason)} (planning past it failed: {first_line(failure)})"
            ) from failure
    if not regions:
        raise CaptureError(_cannot(model, reason))
    note = f"captured in {len(regions)} regions, since {reason}; what runs between them is not planned"
    return tuple(regions), (note,)


def _cannot(model: nn.Module, reason: str) -> str:
    return (
        f"the forward of {type(model).__name__} cannot be captured as a graph: {reason}; mend the model there, or add "
        "'plain' to allow to run it unplanned"
    )

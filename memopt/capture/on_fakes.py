"""A training call captured on fake tensors: the model's parameters have no values, and may be cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.captured_call import CapturedCall
from memopt.capture.dry_run import DryRun, as_run_later, record_dry_run
from memopt.capture.dynamo import CallStopped, GraphBreak, compile_call, training_call
from memopt.capture.inputs import Call, fake_call
from memopt.capture.region import RecordedRegion
from memopt.compat.dynamo import keep_nodes
from memopt.compat.fakes import FakeTensorMode, new_fake_mode, to_fake
from memopt.compat.host import HOST
from memopt.saved_values import generator_states, set_generators
from memopt.training_state import Attributes, replaced_parameters


@dataclass(frozen=True)
class ParameterCast:
    """The dtype that fp32 parameters and inputs are cast to before a call is captured on fake tensors, and the `id`s of
    the tensors that stay in fp32."""

    dtype: torch.dtype
    kept: frozenset[int]
    """The `id`s of parameters that keep their dtype."""

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype that a parameter or buffer is planned with."""
        narrows = isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float32 and id(tensor) not in self.kept
        return self.dtype if narrows else tensor.dtype


def capture_on_fakes(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    device: torch.device,
    *,
    differentiate_all: bool,
    narrowed: ParameterCast | None = None,
) -> CapturedCall:
    """Capture one training call on fake tensors on `device`; no memory is allocated and the model does not change.

    With `narrowed`, parameters and inputs are captured in another dtype than they have. `differentiate_all` is as for
    `RecordedRegion.record`. Where the forward breaks into regions, its Python code runs on fakes. Raises `CaptureError`
    where the call cannot be captured."""
    mode = new_fake_mode()
    floats = narrowed.dtype if narrowed else None
    to_capture = partial(training_call, model, loss_fn, floats)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return to_fake(mode, tensor, device, narrowed.dtype_of(tensor) if narrowed else None)

    with torch.enable_grad(), replaced_parameters(model, fake) as fakes:
        args, kwargs = fake_call(call, mode, device)
        ids = {id(fake): id(real) for real, fake in fakes.items()}
        found: list[RecordedRegion] = []

        def record_whole(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            region = RecordedRegion.record(
                graph_module, inputs, differentiate_all=differentiate_all, real_ids=ids, narrowed=floats
            )
            found.append(region)
            keep_nodes(graph_module)
            raise CallStopped

        try:
            compile_call(to_capture(), record_whole, whole=True)(*args, **kwargs)
        except CallStopped:
            return CapturedCall.of(found[0])
        except GraphBreak as broken:
            reason = str(broken)
        else:
            reason = PASSED_OVER
        return _capture_regions(model, to_capture(), (args, kwargs), ids, reason, mode)


PASSED_OVER = "torch.compile runs the model's forward without compiling it"


def _capture_regions(
    model: nn.Module, forward: Callable[..., Any], call: Call, ids: dict[int, int], reason: str, mode: FakeTensorMode
) -> CapturedCall:
    """The regions of a call on fakes whose forward, for the `reason` given, is not one graph; runs its Python code."""
    args, kwargs = call
    dry_run: DryRun

    def record_part(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with dry_run.between.planned():
            region = RecordedRegion.record(graph_module, inputs, differentiate_all=True, real_ids=ids)
        return lambda *values: dry_run.run(region, values)

    parts = compile_call(forward, record_part, whole=False)

    def capture() -> CapturedCall:
        nonlocal dry_run
        dry_run = DryRun(ids)
        attributes, generators = Attributes(model), generator_states(HOST)  # fakes draw from no other
        try:
            return record_dry_run(lambda: parts(*args, **kwargs), dry_run, model, reason, mode)
        finally:
            attributes.restore()
            set_generators(generators, HOST)

    return as_run_later(capture, record_part)

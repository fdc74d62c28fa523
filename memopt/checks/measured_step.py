"""Runs one forward and backward from a saved state and measures it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.account.account import distinct_bytes
from memopt.capture.dynamo import in_brief
from memopt.checks.comparison import StepRun
from memopt.meter import measure_peak
from memopt.rewrite.dtypes import dtype_name
from memopt.run.loss import scalar_loss
from memopt.run.session import Session, session_of
from memopt.saved_values import generator_states
from memopt.training_state import Tensors, TrainingState

# The first scale of torch.amp.GradScaler, and the divisor of the next ones, which falls faster than the scaler's.
_FIRST_SCALE = 65536.0
_BACKOFF = 16.0


def optimised(model: nn.Module) -> Session:
    """The session of a model that `optimize` has changed: the object that plans and runs its training calls. Raises
    `ValueError` for any other model, and for one that is not in training mode."""
    session = session_of(model)
    if session is None:
        raise ValueError(f"this {type(model).__name__} is not optimised; call memopt.optimize first")
    if not model.training:
        raise ValueError(f"this {type(model).__name__} is in eval mode, which runs plain; call model.train() first")
    return session


@dataclass(frozen=True)
class MeasuredStep:
    """The results of one forward and backward: loss, peak and seconds, gradients, buffers and random states."""

    run: StepRun
    gradients: Tensors
    buffers: Tensors
    generators: tuple[Any, ...]


def measured(
    call: Callable[[], Any], start: TrainingState, beside: Sequence[MeasuredStep], scale: float = 1.0
) -> MeasuredStep:
    """Run and measure a step from the state `start`: the forward, `call()`, and the backward of its loss times `scale`.
    The bytes that `start` and the results of earlier steps (`beside`) hold are not part of the peak."""
    start.restore()
    gc.collect()
    kept = (tensor for step in beside for tensor in (*step.gradients.values(), *step.buffers.values()))
    aside = [*start.kept(), *kept]
    with measure_peak(start.device) as peak:
        started = time.perf_counter()
        loss = _train(call, scale)
        seconds = time.perf_counter() - started
    return _step(StepRun(loss, peak.bytes - bytes_on(start.device, aside), seconds, scale), start)


def first_run(call: Callable[[], Any], start: TrainingState, low: torch.dtype | None) -> MeasuredStep | None:
    """Run the step in which the model is planned and compiled, from the state `start`; peak and seconds are 0 in the
    result. In fp16 the loss is scaled by 65,536, and the result None if a gradient is not finite."""
    start.restore()
    scale = _FIRST_SCALE if low == torch.float16 else 1.0
    step = _step(StepRun(_train(call, scale), 0, 0.0, scale), start)
    return step if scale == 1 or _is_finite(step) else None


def _step(run: StepRun, start: TrainingState) -> MeasuredStep:
    """The results of a run, with the gradients (unscaled), buffers and generator states that it has left."""
    gradients = start.gradients_now()
    if run.loss_scale != 1:
        gradients = {name: gradient / run.loss_scale for name, gradient in gradients.items()}
    return MeasuredStep(run, gradients, start.buffers_now(), generator_states(start.device))


def scaled(
    call: Callable[[], Any], start: TrainingState, beside: Sequence[MeasuredStep], low: torch.dtype | None
) -> MeasuredStep:
    """Run and measure a step as `measured` does. For the dtype `low` fp16 it is repeated with smaller loss scales, from
    65,536, until all gradients are finite or the scale is 1."""
    scale = _FIRST_SCALE if low == torch.float16 else 1.0
    while True:
        step = measured(call, start, beside, scale)
        if scale == 1 or _is_finite(step):
            return step
        scale = max(1.0, scale / _BACKOFF)


def autocast_step(
    call: Callable[[], Any],
    start: TrainingState,
    beside: Sequence[MeasuredStep],
    low: torch.dtype | None,
    notes: list[str],
) -> MeasuredStep | None:
    """A measured step of the plain model under autocast in `low`; None if that is None, or if the model does not run
    under autocast: the reason then goes to `notes`."""
    if low is None:
        return None

    def under_autocast() -> Any:
        with torch.autocast(start.device.type, dtype=low):
            return call()

    try:
        return scaled(under_autocast, start, beside, low)
    except RuntimeError as failure:  # a kernel that is missing in this dtype
        notes.append(f"torch.autocast in {dtype_name(low)} does not run this model here: {in_brief(failure)}")
        return None


def _train(call: Callable[[], Any], scale: float) -> float:
    """Run a forward and its backward with the loss times `scale`, holding the outputs as loops do; returns the loss."""
    output = call()
    loss = scalar_loss(output)
    (loss * scale if scale != 1 else loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())  # waits for the device


def _is_finite(step: MeasuredStep) -> bool:
    values = (one.coalesce().values() if one.is_sparse else one for one in step.gradients.values())
    return all(bool(one.isfinite().all()) for one in values)


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor], block_bytes: int = 1) -> int:
    """The bytes of the storages of dense tensors on a device, each counted once, in blocks of `block_bytes`."""
    here = (one for one in tensors if one.device == device and one.layout == torch.strided)
    return distinct_bytes(here, block_bytes)

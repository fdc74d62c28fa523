"""Runs one forward and backward from a saved state, and measures it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from memopt.account.account import distinct_bytes
from memopt.capture.dynamo import in_brief
from memopt.checks.comparison import Run
from memopt.meter import measure_peak
from memopt.rewrite.policy import dtype_name
from memopt.run.loss import scalar_loss
from memopt.training_state import Tensors, TrainingState, generator_states

Around: TypeAlias = Callable[[], AbstractContextManager[Any]]
# The first scale of torch.amp.GradScaler, and the divisor of the next ones, which falls faster than the scaler's.
_FIRST_SCALE = 65536.0
_BACKOFF = 16.0


@dataclass(frozen=True)
class MeasuredStep:
    """The results of one forward and backward: loss, peak and seconds, gradients, buffers and random states."""

    run: Run
    gradients: Tensors
    buffers: Tensors
    generators: tuple[Any, ...]


def measured(
    call: Callable[[], Any],
    start: TrainingState,
    beside: Sequence[MeasuredStep],
    scale: float = 1.0,
    around: Around = nullcontext,
) -> MeasuredStep:
    """Run a step from the state `start`, in the context `around` and with the loss multiplied by `scale`.

    The bytes that `start` and earlier steps `beside` keep are left out of the peak.
    """
    start.restore()
    gc.collect()
    kept = (tensor for step in beside for tensor in (*step.gradients.values(), *step.buffers.values()))
    aside = [*start.kept(), *kept]
    with measure_peak(start.device) as peak:
        started = time.perf_counter()
        loss = train(call, scale, around)
        seconds = time.perf_counter() - started
    return _step(Run(loss, peak.bytes - _bytes_on(start.device, aside), seconds, scale), start)


def first_run(call: Callable[[], Any], start: TrainingState, low: torch.dtype | None) -> MeasuredStep | None:
    """Run a step that plans and compiles, without its peak and seconds, with the first loss scale in fp16; None where
    the gradients are not finite with that."""
    start.restore()
    scale = _FIRST_SCALE if low == torch.float16 else 1.0
    step = _step(Run(train(call, scale), 0, 0.0, scale), start)
    return step if scale == 1 or _is_finite(step) else None


def _step(run: Run, start: TrainingState) -> MeasuredStep:
    """The run with what it has left behind."""
    gradients = start.gradients_now()
    if run.loss_scale != 1:
        gradients = {name: gradient / run.loss_scale for name, gradient in gradients.items()}
    return MeasuredStep(run, gradients, start.buffers_now(), generator_states(start.device))


def scaled(
    call: Callable[[], Any],
    start: TrainingState,
    beside: Sequence[MeasuredStep],
    low: torch.dtype | None,
    around: Around = nullcontext,
) -> MeasuredStep:
    """Run a step with the largest loss scale with which all gradients are finite, in fp16; with scale 1 in other
    dtypes."""
    scale = _FIRST_SCALE if low == torch.float16 else 1.0
    while True:
        step = measured(call, start, beside, scale, around)
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
    """A step of the plain model under autocast in the dtype `low`; None without one, or, with a note, where it does not
    run."""
    if low is None:
        return None
    try:
        return scaled(call, start, beside, low, lambda: torch.autocast(start.device.type, dtype=low))
    except RuntimeError as failure:  # a kernel that is missing in this dtype
        notes.append(f"torch.autocast in {dtype_name(low)} does not run this model here: {in_brief(failure)}")
        return None


def train(call: Callable[[], Any], scale: float = 1.0, around: Around = nullcontext) -> float:
    """Run a forward, in the context `around`, and its backward, while the outputs are held as training loops do; return
    the loss."""
    with around():
        output = call()
    loss = scalar_loss(output)
    (loss * scale if scale != 1 else loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())  # waits for the device


def _is_finite(step: MeasuredStep) -> bool:
    return all(bool(_values(gradient).isfinite().all()) for gradient in step.gradients.values())


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    return distinct_bytes(here for here in tensors if here.device == device and here.layout == torch.strided)

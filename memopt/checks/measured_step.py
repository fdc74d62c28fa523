"""Runs one forward and backward from a kept state, and measures it."""

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
from memopt.rewrite.precision.plan import dtype_name
from memopt.train.loss import scalar_loss
from memopt.training_state import Tensors, TrainingState, generator_states

Around: TypeAlias = Callable[[], AbstractContextManager[Any]]
# Where torch.amp.GradScaler begins, and, faster than it, how it comes down.
_FIRST_SCALE = 65536.0
_BACKOFF = 16.0


@dataclass(frozen=True)
class Step:
    """What one forward and backward left behind."""

    run: Run
    gradients: Tensors
    buffers: Tensors
    generators: tuple[Any, ...]


def measured(
    call: Callable[[], Any],
    start: TrainingState,
    beside: Sequence[Step],
    scale: float = 1.0,
    around: Around = nullcontext,
) -> Step:
    """Run a step from `start`; what `start` and earlier steps `beside` keep does not count."""
    start.restore()
    gc.collect()
    kept = (tensor for step in beside for tensor in (*step.gradients.values(), *step.buffers.values()))
    aside = [*start.kept(), *kept]
    with measure_peak(start.device) as peak:
        started = time.perf_counter()
        loss = train(call, scale, around)
        seconds = time.perf_counter() - started
    run = Run(loss, peak.bytes - _bytes_on(start.device, aside), seconds, scale)
    generators = generator_states(start.device)
    gradients = start.gradients_now()
    if scale != 1:
        gradients = {name: each / scale for name, each in gradients.items()}
    return Step(run, gradients, start.buffers_now(), generators)


def scaled(
    call: Callable[[], Any],
    start: TrainingState,
    beside: Sequence[Step],
    low: torch.dtype | None,
    around: Around = nullcontext,
) -> Step:
    """Run a step as a loss scaler would have it: in fp16, the loss is scaled as far as gradients stay finite."""
    scale = _FIRST_SCALE if low == torch.float16 else 1.0
    while True:
        step = measured(call, start, beside, scale, around)
        if scale == 1 or all(bool(_values(each).isfinite().all()) for each in step.gradients.values()):
            return step
        scale = max(1.0, scale / _BACKOFF)


def autocast_step(
    call: Callable[[], Any], start: TrainingState, beside: Sequence[Step], low: torch.dtype | None, notes: list[str]
) -> Step | None:
    """A step of the plain model under autocast; None, and a note if it was to run, where it does not."""
    if low is None:
        return None
    try:
        return scaled(call, start, beside, low, lambda: torch.autocast(start.device.type, dtype=low))
    except RuntimeError as failure:  # a kernel that is missing in this dtype
        notes.append(f"torch.autocast in {dtype_name(low)} does not run this model here: {in_brief(failure)}")
        return None


def train(call: Callable[[], Any], scale: float = 1.0, around: Around = nullcontext) -> float:
    """Run a forward, with `around` it, and its backward, the outputs held meanwhile as training loops do; returns the
    loss."""
    with around():
        output = call()
    loss = scalar_loss(output)
    (loss * scale if scale != 1 else loss).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())  # waits for the device


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    return distinct_bytes(each for each in tensors if each.device == device and each.layout == torch.strided)

"""Trains one step of the optimised model and one of the plain model from the same state, and compares them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memopt.budget.account import distinct_bytes
from memopt.capture.inputs import as_call, check_device
from memopt.comparison import Comparison, Difference, Run
from memopt.meter import measure_peak
from memopt.planned_call import planned_call_of
from memopt.step.loss import scalar_loss
from memopt.training_state import Tensors, TrainingState


def compare(model: nn.Module, batch: Any) -> Comparison:
    """Train one forward and backward of the optimised `model` and of its plain self on `batch`, and compare them.

    Both start from the same parameters, buffers and random state and are measured by the same meter. The optimised
    model runs once before that, so that planning and compiling are not measured: three steps in all. Gradients,
    buffers and random states are afterwards as they were, also when a step fails.

    The peaks are of everything on the device (see `measure_peak`) except what the comparison keeps aside. The optimiser
    does not step; its state counts where it is there.

    Args:
        batch: what the model takes, as `example_inputs` of `optimize`: a tuple, a dict, a tensor; with a `loss_fn` the
            pair `(inputs, targets)`.

    Raises:
        ValueError: the model is not optimised or not in training mode, its loss is no scalar, or a hook acts on
            accumulated gradients.
        TypeError: the batch is not one, or the model returns no loss.
        BudgetError: no plan for this batch fits the budget.
    """
    planned = planned_call_of(model)
    if planned is None:
        raise ValueError(f"this {type(model).__name__} is not optimised; call memopt.optimize first")
    if not model.training:
        raise ValueError(f"this {type(model).__name__} is in eval mode, which runs plain; call model.train() first")
    _refuse_acting_hooks(model)
    calls = planned.with_loss or planned.forward
    args, kwargs = as_call(batch, with_targets=planned.with_loss is not None)
    check_device((args, kwargs), model)
    start = TrainingState.of(model)
    try:
        with torch.enable_grad():
            start.restore()
            _train(lambda: calls(*args, **kwargs))
            optimized = _measured(lambda: calls(*args, **kwargs), start)
            plain = _measured(lambda: calls.plain(*args, **kwargs), start, beside=optimized)
    finally:
        start.restore()
        start.restore_gradients()
    return Comparison(
        plain.run,
        optimized.run,
        _differences(optimized.gradients, plain.gradients),
        _differences(optimized.buffers, plain.buffers),
        planned.options.budget_bytes,
    )


def _refuse_acting_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"a hook acts on the accumulated gradient of {name}, and may change the model (an optimiser in the "
                "backward does), which a comparison must not; remove the hook to compare"
            )


@dataclass(frozen=True)
class _Step:
    """What one forward and backward left behind."""

    run: Run
    gradients: Tensors
    buffers: Tensors


def _measured(call: Callable[[], Any], start: TrainingState, beside: _Step | None = None) -> _Step:
    """Run a step from `start`; what `start` and an earlier step `beside` keep does not count."""
    start.restore()
    gc.collect()
    aside = [
        *start.kept(),
        *(beside.gradients.values() if beside else ()),
        *(beside.buffers.values() if beside else ()),
    ]
    with measure_peak(start.device) as peak:
        started = time.perf_counter()
        loss = _train(call)
        seconds = time.perf_counter() - started
    run = Run(loss, peak.bytes - _bytes_on(start.device, aside), seconds)
    return _Step(run, start.gradients_now(), start.buffers_now())


def _train(call: Callable[[], Any]) -> float:
    """Run a forward and its backward, the outputs held meanwhile as training loops do; returns the loss."""
    output = call()
    loss = scalar_loss(output)
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())  # waits for the device


def _bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    return distinct_bytes(each for each in tensors if each.device == device and each.layout == torch.strided)


def _differences(optimized: Tensors, plain: Tensors) -> tuple[Difference, ...]:
    names = dict.fromkeys([*plain, *optimized])
    return tuple(Difference.of(name, optimized.get(name), plain.get(name)) for name in names)

"""Trains one step of the optimised model and one of the plain model from the same state, and compares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memopt.capture.caller_modes import autocast_is_on
from memopt.capture.inputs import Call, batch_call, check_device, copied, tensors_in
from memopt.checks.comparison import Comparison, differences_of
from memopt.checks.measured_step import MeasuredStep, autocast_step, first_run, measured, optimised, scaled
from memopt.checks.reference import Accuracies, Accuracy, Exact, float64_step
from memopt.compat.hooks import post_accumulate_hooks
from memopt.device.devices import device_of
from memopt.errors import GradientMismatchError
from memopt.planning.changes import source_line
from memopt.planning.plan import Plan
from memopt.progress import stage
from memopt.rewrite.dtypes import dtype_name
from memopt.run.session import Session
from memopt.saved_values import parameters_restored, values_restored
from memopt.training_state import TrainingState, containers_restored
from memopt.units import size
from passes.graphs.node_facts import backward_nodes

_REFERENCES = ("auto", "float64", "fp32")
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ROUNDING = 1e-4
"""The largest relative error, of the loss and of all gradients as one vector, that `verify` accepts of a plan that
computes in the model's own dtype. Other kernels and other orders of sums stay far below it."""
OF_AUTOCAST, SIXTEEN_BITS, EIGHT_BITS = 2.0, 1e-2, 0.3
"""The largest errors that `verify` accepts of other plans. In 16 bits: `OF_AUTOCAST` times autocast's error,
or `SIXTEEN_BITS` if that is more. With 8-bit layers: `EIGHT_BITS`."""
SHARE = 1e-2
"""The part of the accepted error that a single parameter's gradient may have where nothing is cast. With casts it may
have all of it: the gradient of a bias before a normalisation is zero up to rounding, and its error can be as large as
that of all others."""


def compare(model: nn.Module, batch: Any, *, reference: str = "auto") -> Comparison:
    """Run one forward and backward of the optimised `model` and one of the plain model on `batch`, and compare them.

    Where the plan computes in 16 bits, the plain model also trains under `torch.autocast` in that dtype. The errors of
    all runs are against the `reference`, by default a float64 step of a copy that draws the plain step's random
    numbers. In fp16 the loss is scaled, from 65,536 down until all gradients are finite.

    Every run starts from the same parameters, buffers and random state, and is measured in the same way. The optimised
    model runs once before, so that planning and compiling are not measured. The values of that run are compared as
    well: each difference and error of the optimised model is the larger one of its two runs, with a note where they
    differ. Afterwards gradients, buffers and random states are restored, also when a step fails.

    Peaks count everything on the device (see `measure_peak`) except what the comparison itself keeps. The optimizer
    does not step; its state counts where it exists.

    Args:
        batch: the model's inputs as for `optimize(example_inputs=…)`: a tuple, a dict or a tensor; with a `loss_fn`
            the pair `(inputs, targets)`.
        reference: "float64"; "fp32", which is the plain run; or "auto": float64 where the model runs in it and twice
            the plain step's peak is free on the device, else fp32, with a note.

    Raises:
        ValueError: the model is not optimised or not in training mode, its loss is no scalar, a hook acts on
            accumulated gradients, `reference` is another string, or "float64" and the model does not run in it.
        TypeError: `batch` is not a tuple, dict or tensor, or the model returns no loss.
        BudgetError: no plan for this batch fits the budget.
    """
    if reference not in _REFERENCES:
        raise ValueError(f"reference must be one of {', '.join(map(repr, _REFERENCES))}, not {reference!r}")
    planned = optimised(model)
    for name, parameter in model.named_parameters():
        if post_accumulate_hooks(parameter):
            raise ValueError(
                f"the post-accumulate-grad hook of {name} may change the model in the backward, as an optimizer in the "
                "backward does; remove the hook to compare"
            )
    model = planned.model  # the module inside DDP, so that no gradients are exchanged
    calls = planned.with_loss or planned.forward
    call = batch_call(batch, calls.loss_fn)
    check_device(call, model)
    with calls.share.held_still(call), calls.plain_calls.only_way(plain=False):
        return _compared(model, planned, copied(call), reference)


def _compared(model: nn.Module, planned: Session, call: Call, reference: str) -> Comparison:
    start = TrainingState.whole(model)
    low = planned.low if planned.low in _SIXTEEN_BITS and not autocast_is_on() else None
    notes: list[str] = []
    try:
        with torch.enable_grad(), stage("comparing with the plain model"):
            ours, plain, autocast = _runs(planned, call, start, low, notes)
            loss_fn = (planned.with_loss or planned.forward).loss_fn
            with _restored(model, call):
                exact = _exact(model, call, loss_fn, start, plain, reference, notes)
    finally:
        start.restore()
        start.restore_gradients()
    return Comparison(
        plain=plain.run,
        optimized=replace(ours[0].run, loss=_furthest([step.run.loss for step in ours], plain.run.loss)),
        gradients=differences_of([step.gradients for step in ours], plain.gradients),
        buffers=differences_of([step.buffers for step in ours], plain.buffers),
        budget_bytes=planned.options.budget_bytes,
        autocast=autocast.run if autocast else None,
        autocast_dtype=dtype_name(low) if autocast and low else "",
        accuracies=_accuracies(exact, plain, autocast, ours),
        notes=tuple(notes),
    )


def _runs(
    planned: Session, call: Call, start: TrainingState, low: torch.dtype | None, notes: list[str]
) -> tuple[list[MeasuredStep], MeasuredStep, MeasuredStep | None]:
    """The steps to compare: of the optimised model a measured one, and its first if its gradients are finite; one of
    the plain model; and one of that under autocast in `low`, if given, None if that fails."""
    calls, (args, kwargs) = planned.with_loss or planned.forward, call
    with _restored(planned.model, call):
        first = first_run(lambda: calls(*args, **kwargs), start, planned.low)
    beside = () if first is None else (first,)
    with _restored(planned.model, call):
        ours = [scaled(lambda: calls(*args, **kwargs), start, beside, planned.low), *beside]
    if first is None:
        notes.append(
            "the first run of the optimised model is not compared, since its gradients are not finite with the "
            "initial loss scale"
        )
    elif not _same(first, ours[0]):
        notes.append("the first run of the optimised model gives other values than the second one")
    with _restored(planned.model, call):
        plain = measured(lambda: calls.plain(*args, **kwargs), start, ours)
    with _restored(planned.model, call):
        autocast = autocast_step(lambda: calls.plain(*args, **kwargs), start, (*ours, plain), low, notes)
    return ours, plain, autocast


@contextmanager
def _restored(model: nn.Module, call: Call) -> Iterator[None]:
    """A context at whose exit the batch and the model's parameters, to which a forward may write, are restored."""
    with values_restored(tensors_in(call)), containers_restored(call), parameters_restored(model):
        yield


def _same(first: MeasuredStep, later: MeasuredStep) -> bool:
    """Whether two steps have bitwise the same gradients and buffers, or ran with different loss scales."""
    found = (*differences_of([first.gradients], later.gradients), *differences_of([first.buffers], later.buffers))
    return first.run.loss_scale != later.run.loss_scale or all(one.bitwise for one in found)


def _exact(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    start: TrainingState,
    plain: MeasuredStep,
    reference: str,
    notes: list[str],
) -> Exact | None:
    """The loss and gradients in float64; None, with a note that says why, where the plain step is the reference. Raises
    `ValueError` where float64 was asked for and the model does not run in it."""
    if reference == "fp32":
        return None
    start.restore()
    needed, free = 2 * plain.run.peak_bytes, device_of(start.device).free_bytes(start.device)
    if reference == "auto" and (free is None or needed > free):
        known = "it is not known how much memory is free there" if free is None else f"{size(free)} are free"
        found: Exact | str = f"a run in float64 would hold {size(needed)} on {start.device}, and {known}"
    else:
        found = float64_step(model, call, loss_fn, start.generators, plain.generators)
    if not isinstance(found, str):
        return found
    if reference == "float64":
        raise ValueError(f"there is no float64 reference, since {found}; compare with reference='fp32'")
    notes.append(f"errors are against the plain run in fp32, since {found}")
    return None


def _accuracies(
    exact: Exact | None, plain: MeasuredStep, autocast: MeasuredStep | None, ours: Sequence[MeasuredStep]
) -> Accuracies:
    against = exact or (plain.run.loss, plain.gradients)

    def accuracy(step: MeasuredStep) -> Accuracy:
        return Accuracy.of(step.run.loss, step.gradients, *against)

    return Accuracies(
        "float64" if exact else "fp32",
        against[0],
        accuracy(plain) if exact else None,
        accuracy(autocast) if autocast else None,
        max(map(accuracy, ours), key=lambda found: (found.gradient, found.loss)),
    )


def _furthest(losses: Sequence[float], plain: float) -> float:
    """The loss that is furthest from the plain model's; the first one if all are equal to it."""
    others = [loss for loss in losses if loss != plain and not (math.isnan(loss) and math.isnan(plain))]
    return max(others, key=lambda loss: math.inf if math.isnan(loss) else abs(loss - plain), default=losses[0])


def verify(model: nn.Module, batch: Any) -> Comparison:
    """Train one planned and one plain step from the same state, which is then restored, and return how they compare.

    The plain step is not held to the budget: the device needs memory for it.

    Raises:
        GradientMismatchError: loss, gradients or buffers differ by more than the plan's precision explains. Of the
            parameters with wrong gradients, it names the one nearest to the loss, and the operator that reads it.
        ValueError, TypeError, BudgetError: as `memopt.compare`.
    """
    comparison = compare(model, batch, reference="fp32")
    accuracies = comparison.accuracies
    if comparison.bitwise or not math.isfinite(comparison.plain.loss):
        return comparison
    planned = optimised(model)
    plan = planned.latest
    limit = _limit(comparison, plan)
    wrong = wrong_gradients(accuracies.optimized, limit, SHARE if limit == ROUNDING else 1.0)
    buffers = [] if comparison.autocast_dtype else [one.name for one in comparison.buffers if one.relative > limit]
    loss = accuracies.optimized.loss
    if wrong or buffers or not loss <= limit:
        raise GradientMismatchError(_message(planned.model, plan, loss, wrong, buffers, limit))
    return comparison


def wrong_gradients(accuracy: Accuracy, limit: float, share: float) -> dict[str, float]:
    """The relative error of each gradient that is wrong, by parameter name: infinite, or above `limit` while it is also
    above `share * limit` of the norm of all gradients. If none is, that of "all parameters together", if above
    `limit`."""
    return {
        error.name: error.relative
        for error in accuracy.gradients
        if math.isinf(error.relative) or (error.relative > limit and error.relative * error.share > share * limit)
    } or ({} if accuracy.gradient <= limit else {"all parameters together": accuracy.gradient})


def _limit(comparison: Comparison, plan: Plan | None) -> float:
    if plan is not None and any("fp8" in lever for lever in plan.levers):
        return EIGHT_BITS
    if not comparison.autocast_dtype:
        return ROUNDING
    autocast = comparison.accuracies.autocast
    return max(SIXTEEN_BITS, OF_AUTOCAST * max(autocast.gradient, autocast.loss) if autocast else 0.0)


def _message(
    model: nn.Module, plan: Plan | None, loss: float, wrong: dict[str, float], buffers: list[str], limit: float
) -> str:
    parts = [f"the loss by {loss:.1e}"] if not loss <= limit else []
    nearest = last_read(model, plan, wrong)
    if wrong:
        name, place = nearest or (max(wrong, key=lambda one: wrong[one]), "")
        which = f" (of the {len(wrong)} that differ, the one nearest to the loss{place})" if nearest else ""
        parts.append(f"the gradient of {name} by {wrong[name]:.1e}{which}")
    if buffers:
        parts.append(f"the buffers {', '.join(buffers[:3])}")
    return (
        f"the planned step of this {type(model).__name__} differs from the plain one by more than {limit:.0e}: "
        f"{'; '.join(parts)}; the model and its gradients are as before this step: go on without memopt "
        "(memopt.remove(model)), and report this with the table of memopt.compare(model, batch)"
    )


def last_read(model: nn.Module, plan: Plan | None, names: Collection[str]) -> tuple[str, str] | None:
    """The parameter among `names` that the forward reads last, and a description of the operator that reads it; None
    where it is not known. The backward computes its gradient first, so a wrong one comes from this operator or one
    after it."""
    captured = plan.captured if plan is not None else None
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for joint in reversed(captured.regions if captured is not None else ()):
        inputs = joint.module.graph.find_nodes(op="placeholder")
        known = joint.trace.region.parameter_ids if joint.trace is not None else {}
        of_node = {inputs[number]: parameters.get(parameter) for number, parameter in known.items()}
        backward = backward_nodes(joint.module.graph)
        for node in reversed(joint.module.graph.nodes):
            for read in () if node in backward else reversed(node.all_input_nodes):
                if (name := of_node.get(read)) in names and name is not None:
                    line = source_line(node)
                    return name, f", which {node.target} reads" + (f" ({line})" if line else "")
    return None

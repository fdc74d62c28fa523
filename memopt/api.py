"""What users call. `optimize` reads as the road: check, capture and plan, then take over the training calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from memopt.optimizers import OPTIMIZER_PROPOSALS
from memopt.planning.frontier import Frontier
from memopt.planning.largest import LargestSize
from memopt.planning.options import DEFAULT_ALLOW, check_effort, check_options, check_points, check_share, positive_int
from memopt.planning.plan import Plan
from memopt.rewrite.precision import Policy
from memopt.run.planned_call import PlannedCall, planned_call_of
from memopt.solver import Effort as EffortName

Model = TypeVar("Model", bound=nn.Module)
# Nothing needs to be recomputed within it.
_ROOMY_GB = 2.0**40


def optimize(
    model: Model,
    budget_gb: float,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    precision: Policy = "auto",
    allow: Collection[str] = DEFAULT_ALLOW,
    backend: str = "auto",
    outputs: str = "loss",
    calibrate: bool = False,
    effort: EffortName = "default",
    limit_seconds: float | None = None,
) -> Model:
    """Make training steps of `model` fit `budget_gb`, in place, and return the model.

    Training calls (grad enabled, `model.training`) run as planned; all others run the plain model. The plan is made now
    if `example_inputs` are given, else at the first training call; calls with other shapes are planned when they come.

    Args:
        budget_gb: GB of 1024³ bytes for everything that the step holds on the device.
        example_inputs: a tuple (positional) or dict (keywords) of tensors on any device, meta and fake included; with
            `loss_fn`, a pair `(inputs, targets)`.
        loss_fn: trains `loss_fn(model(inputs), targets)` as one region, which `training_loss` calls; without it the
            model returns the loss, or an object that holds it.
        optimizer: what will step: a class, an instance, a name, or None to leave it out of the account.
        precision: "fp32" (bitwise the plain model's numbers); "bf16" or "fp16", where each operator gets the dtype that
            suits it and parameters stay in fp32; "auto": bf16 where the device computes in it, fp16 where it has only
            that (train with a loss scale: `TrainStep` has one), else fp32; "search": a minimum cut over time, saved
            bytes, casts and rounding sets out from the choices of bf16 (fp16 where the device has only that); or rules,
            a dtype by operator, module or node name: `{"default": "bf16", "lm_head": "fp32", "softmax": "fp32"}`.
            Within the caller's own `torch.autocast`, "auto" and "fp32" leave types to it; all others take its place.
        allow: the levers that may be pulled, the cheapest first, and only where recomputation alone would cost time:
            "recompute", "reinplace" (bitwise exact), "fused_ops", "fused_attention", "chunked_loss" (exact but for
            rounding), and "offload_activations" (bitwise exact: the host's memory, where the card has a link to it).
            With `allow={"recompute", "reinplace"}` and precision "fp32", losses and gradients are bitwise the plain
            model's. Off by default are "plain", which runs a model unplanned that cannot be captured, and the proposals
            "bf16_parameters" (for steps in bf16), "low_bit_optimizer", "offload_optimizer" and "optimizer_in_backward"
            (each parameter is stepped as soon as the backward is through with it: no clipping by the norm of all
            gradients, no GradScaler, no accumulation, no `TrainStep`; for backend "aten"), pulled where nothing else
            makes the step fit; they need `example_inputs`, and the optimiser to go through `wrap_optimizer`.
        backend: "aten": planned graphs run as plain ATen operators, bitwise as the plain model's; "inductor": they are
            compiled by torch.compile's own backend, exact but for rounding, and what is then held is checked against
            the budget before anything runs; "auto": inductor on CUDA, plain operators elsewhere.
        outputs: "loss": only scalars are differentiated, and a gradient into another output raises an error; "all";
            "loss_only": as "loss", and logits that only the loss needs come back empty where it is computed in chunks.
        calibrate: time the device, and the ops that make up most of the step, rather than go by its data sheet, for a
            few seconds; what was found is kept on disk for the card, its driver and this version of torch, in
            `MEMOPT_CACHE_DIR` or `~/.cache/memopt`. Plans differ a little from one calibration to the next.
        effort: how hard to look for a plan: "fast" (a fraction of a second), "default" (seconds), or "best": what
            "default" finds, bettered until it meets the bound or the time is over; the first two are deterministic.
        limit_seconds: of wall time for each search of `effort="best"`, 60 if not given; the other efforts take none.

    Raises:
        BudgetError: no plan fits; names the smallest budget that works. With lazy planning, at the training call.
        CaptureError, ValueError, TypeError: what was given cannot be used. The model is then as it was before.
    """
    hard = check_effort(effort, limit_seconds)
    options = check_options(budget_gb, loss_fn, optimizer, precision, allow, backend, outputs, None, calibrate, hard)
    call = PlannedCall(model, replace(options, kept=True))
    if example_inputs is None and (named := sorted(options.allow & set(OPTIMIZER_PROPOSALS))):
        raise ValueError(f"whether {named[0]!r} is pulled is decided before the optimizer is made: give example_inputs")
    if example_inputs is not None:
        call.plan(example_inputs)
    remove(model)
    call.take_over()
    return model


def plan(
    model: nn.Module,
    budget_gb: float,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    precision: Policy = "auto",
    allow: Collection[str] = DEFAULT_ALLOW,
    outputs: str = "loss",
    device: str | None = None,
    calibrate: bool = False,
    effort: EffortName = "default",
    limit_seconds: float | None = None,
) -> Plan:
    """Plan a training step without running anything or changing the model, which may live on the "meta" device.

    `device` names the card to plan for ("rtx-4090", "h100", …; default: the model's own, for a meta model the GPU of
    this machine or else its CPU). Other arguments and errors as in `optimize`.
    """
    hard = check_effort(effort, limit_seconds)
    options = check_options(budget_gb, loss_fn, optimizer, precision, allow, "auto", outputs, device, calibrate, hard)
    return PlannedCall(model, options).plan(example_inputs)


def frontier(
    model: nn.Module,
    example_inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    precision: Policy = "auto",
    allow: Collection[str] = DEFAULT_ALLOW,
    outputs: str = "loss",
    device: str | None = None,
    calibrate: bool = False,
    points: int = 40,
    effort: EffortName = "default",
    limit_seconds: float | None = None,
) -> Frontier:
    """The least added time for every budget, from the smallest that works to the peak with nothing recomputed.

    Like `plan`, it runs nothing and changes nothing, and the model may live on the "meta" device. The step is captured
    once and solved for `points` budgets, half of them evenly apart, half near the smallest, and for the peaks of the
    recipes by hand. `limit_seconds` is shared among all of them. Other arguments and errors as in `plan`;
    `Plan.frontier` needs no second capture.
    """
    hard = check_effort(effort, limit_seconds)
    check_points(points)
    options = check_options(_ROOMY_GB, loss_fn, optimizer, precision, allow, "auto", outputs, device, calibrate)
    roomy = PlannedCall(model, options).plan(example_inputs)
    return roomy.frontier(points, effort=hard.name, limit_seconds=limit_seconds)


def max_batch(
    model: nn.Module,
    budget_gb: float,
    make_inputs: Callable[[int], Any],
    *,
    multiple_of: int = 1,
    at_most: int | None = None,
    max_added_time: float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    precision: Policy = "auto",
    allow: Collection[str] = DEFAULT_ALLOW,
    outputs: str = "loss",
    device: str | None = None,
) -> int:
    """The largest batch whose training step fits, found by planning: nothing is run, `model` may be on "meta".

    `make_inputs(size)` gives the example inputs of a batch of that size as `plan` takes them, "meta" tensors too; sizes
    are multiples of `multiple_of`, up to `at_most`. What a size is the size of is its affair: `max_length` is the same.
    The batch that is named has a plan within the budget, and the next size has none. The very largest may have to
    recompute several times over: `max_added_time` is what a plan may add, as a fraction of the plain step's time (0.3:
    30%), by the time model; None for any amount.

    Raises `BudgetError` where not even `multiple_of` fits; `ValueError` where that adds too much time, or memory does
    not grow with the size. Other arguments and errors as in `plan`.
    """
    step = positive_int("multiple_of", multiple_of)
    most = None if at_most is None else positive_int("at_most", at_most)
    options = check_options(budget_gb, loss_fn, optimizer, precision, allow, "auto", outputs, device)
    if not callable(make_inputs):
        raise TypeError(f"make_inputs must be a function from a size to example inputs, not {make_inputs!r}")
    call = PlannedCall(model, options)
    added = math.inf if max_added_time is None else check_share("max_added_time", max_added_time)

    def plan(size: int) -> Plan:
        return call.plan(make_inputs(size), advise=False)

    return LargestSize(plan, options.budget_bytes, step, most, added).find()


max_length = max_batch
"""The longest sequence that fits: `make_inputs` makes one batch of sequences of the length given."""


def plan_of(model: nn.Module) -> Plan:
    """The plan of an optimised model's latest training call (or of its `example_inputs`).

    Raises `ValueError` where the model is plain, or has not been planned yet.
    """
    call = planned_call_of(model)
    if call is None:
        raise ValueError(f"this {type(model).__name__} is not optimised; call memopt.optimize first")
    if call.latest is None:
        raise ValueError("nothing is planned yet: run a training step, or give optimize its example_inputs")
    return call.latest


def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser as the plan of an optimised model counts on it: with the proposals that were pulled around it.

    Where none was, it is the optimiser itself; where "bf16_parameters" was, the model's parameters become bfloat16.
    Train with what is returned, and give that to schedulers and `TrainStep`. Raises `ValueError` for a plain model, and
    for an optimiser that the proposals do not fit.
    """
    call = planned_call_of(model)
    if call is None:
        raise ValueError(f"this {type(model).__name__} is not optimised; call memopt.optimize first")
    return call.pulled.apply(model, optimizer)


def remove(model: Model) -> Model:
    """Give the plain model back, in place; a plain model stays as it is."""
    call = planned_call_of(model)
    if call is not None:
        call.give_back()
    return model


def training_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch `(inputs, targets)`, by the `loss_fn` that the model was optimised with, as one region."""
    call = planned_call_of(model)
    if call is None or call.with_loss is None:
        raise ValueError("training_loss needs a model optimised with a loss_fn; without one, call the model itself")
    inputs, targets = batch
    return call.loss(inputs, targets)

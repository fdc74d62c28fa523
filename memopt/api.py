"""The public functions. `optimize` checks its options, captures and plans the model's training call, and replaces the
model's call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import Unpack

from memopt.compat.check import check as check_torch
from memopt.levers.optimizer_levers import apply_levers
from memopt.planning.frontier import Frontier
from memopt.planning.largest import largest_size
from memopt.planning.options import (
    DEFAULT_EFFORT,
    DEFAULTS,
    Options,
    PlanOptions,
    StepOptions,
    check_options,
    check_points,
    check_share,
    free_budget,
    positive_int,
    takes_options,
)
from memopt.planning.plan import Plan
from memopt.run.hosted import moved_to_inputs
from memopt.run.session import Session, session_of
from memopt.run.status import Status, unwatch

Model = TypeVar("Model", bound=nn.Module)
_ROOMY_GB = 2.0**40  # a budget in which no step needs to recompute


@takes_options(StepOptions, DEFAULTS)
def optimize(
    model: Model, budget_gb: float | None = None, *, example_inputs: Any = None, **options: Unpack[StepOptions]
) -> Model:
    """Make training steps of `model` fit `budget_gb`, in place, and return the model.

    Training calls (grad enabled, `model.training`) run as planned; all others run the plain model. The plan is made now
    if `example_inputs` are given, else at the first training call; calls with other shapes are planned when they occur.
    Without `example_inputs`, a call whose plain step fits the budget runs plain, unless the options ask for more than
    saving memory: a precision other than "auto" and "fp32", passes, inductor (the default backend on CUDA) or
    calibration. Called again with another budget and otherwise the same options, it plans from the graphs that are
    captured already.

    Args:
        budget_gb: GB of 1024³ bytes for everything that the step holds on the device. By default, what the model's
            card has free now plus what this process holds there already, less a margin of 2% of the card; the log
            and the plan's notes show the figure. On a CPU it must be given.
        example_inputs: a tuple (positional) or dict (keywords) of tensors on any device, meta and fake included; with
            `loss_fn`, a pair `(inputs, targets)`.
        loss_fn: trains `loss_fn(model(inputs), targets)` as one region, which `training_loss` calls; without it the
            model returns the loss, or an object that holds it. A function whose first parameter is named `model`
            gets the model and the batch instead, and may compute derivatives itself.
        optimizer: the optimizer that will step (default AdamW): a class, an instance, a name, or None to leave it out
            of the account.
        precision: "auto" (default): bf16 where the device computes in it, fp16 where it has only that (train with a
            loss scale: `TrainStep` has one), else fp32, for the calls that are planned; "fp32": every operator has
            the plain model's dtype; "bf16" or "fp16": each operator gets the dtype that suits it, and parameters
            stay in fp32; "search": starts from the choices of bf16 (fp16 where the device has only that) and
            improves them by a minimum cut over time, saved bytes, casts and rounding; or rules, a dtype by operator,
            module or node name: `{"default": "bf16", "lm_head": "fp32", "softmax": "fp32"}`. Outputs of the model
            have the plain model's dtypes in all cases. Within the caller's own `torch.autocast`, "auto" and "fp32"
            leave dtypes to it; all others replace it.
        allow: the levers that a plan may use, by name or as your own `Lever` objects; by default
            `memopt.DEFAULT_LEVERS`. To add to these, give `allow=memopt.DEFAULT_LEVERS | {"fp8"}`. `memopt.LEVERS`
            describes each: what it does, how exact it is, what it costs and when it is tried. The default ones are
            bitwise exact, or exact but for rounding; with `{"recompute", "reinplace"}` and precision "fp32", losses and
            gradients are bitwise the plain model's. Of the others, 8-bit layers need a step in 16 bits; levers on the
            optimizer are used where nothing else makes the step fit, and need `example_inputs` and an optimizer from
            `wrap_optimizer`; "plain" lets a model that cannot be captured run without a plan.
        backend: "aten": planned graphs run as ATen operators, bitwise as in the plain model; "inductor": they are
            compiled by torch.compile's own backend, exact but for rounding, and the compiled code is checked against
            the budget before it runs; "auto" (default): "inductor" on CUDA, "aten" elsewhere and with
            "offload_parameters".
        outputs: "loss" (default): of the outputs of a model that returns its loss, only the loss is differentiated.
            A scalar does not count as the loss if another output depends on parameters that the scalar does not
            depend on (a learned temperature, a commitment loss); all outputs are differentiated then. Other outputs,
            such as logits, are not held: each is returned as a tensor that is computed when it is first read, with
            the plain model's value, in memory outside of the budget. Read it before `optimizer.step()`: a later read
            raises `StaleOutputError`. Its sizes and dtype can be read at any time. The first gradient into such an
            output is computed by a second forward, outside of the budget, and later calls are planned as with "all";
            where a second forward is impossible, the backward raises `UnplannedGradientError`. "all": all outputs are
            differentiated, and held; "loss_only" is an older name of "loss".
        dynamic: sizes that change from batch to batch, nested like the batch as in `torch.export`: `{"input_ids":
            {1: Dim("length", max=2048)}}`. The call is then captured once and planned for the largest sizes; smaller
            ones run by the same plan, or by one of a few for smaller batches. Without it, a size counts as changing
            once a second value of it is seen, and plans are made for up to a quarter more than was seen.
        passes: your own passes (`passes.Pass`), run on the kind of graphs that each is for, checked and priced.
        solvers: your own solvers, with a `name` and `candidates(problem, budget_bytes)`; their schedules compete
            with those of memopt's own solvers, judged by the simulator.
        elsewhere_gb: GB on the device that are no part of the step: other models, averages of the parameters, cached
            tensors. By default they are found when a plan is made, and when they have grown (on the CPU among
            Python's tensors, on CUDA also from the allocator). A number given here counts instead of what is found;
            0 leaves it out of the budget. A plan for another device counts none by default.
        host_gb: the most of the host's memory, in GB, that offloaded activations and parameters may take; by default
            half of it, or 90% of what is free of it where that is less; in a plan for another card twice that
            card's memory.
        forwards: the number of forwards of the model that run before the first backward, 1 by default. More are
            noticed automatically (two views, chosen and rejected answers) and planned for from the next step on;
            where the budget is tight the first such step is refused unless the number is given.
        calibrate: time the device, and the operators that make up most of the step, for a few seconds, instead of
            trusting its data sheet. The times are stored on disk for the card, its driver and this version of torch,
            in `MEMOPT_CACHE_DIR` or `~/.cache/memopt`. Plans differ a little from one calibration to the next.
        effort: how hard to look for a plan: "fast" (a fraction of a second), "default" (seconds), or "best": improves
            the plan of "default" until it meets the lower bound or the time is over; the first two are deterministic.
        limit_seconds: wall time of each search, 60 if not given; only with `effort="best"`.

    Raises:
        BudgetError: no plan fits; names the smallest budget that works. With lazy planning, at the training call.
        CaptureError, ValueError, TypeError: an argument cannot be used. The model is then as it was before.
    """
    check_torch()
    budget_gb, note = free_budget(model) if budget_gb is None else (budget_gb, "")
    checked = check_options(budget_gb, **options)
    if example_inputs is None and (named := sorted(checked.optimizer_levers)):
        raise ValueError(
            f"{named[0]!r} in allow changes the optimizer, so the plan has to be made now, for memopt.wrap_optimizer, "
            f"and not at the first training call: give example_inputs, or leave {named[0]!r} out of allow"
        )
    earlier = session_of(model)
    with moved_to_inputs(model, checked, example_inputs):
        session = Session(model, replace(checked, to_train=True, budget_note=note))
        with session.from_captures(earlier):
            if example_inputs is not None:
                session.plan(example_inputs)
    unwatch(model)
    if earlier is not None:
        earlier.leave()
    session.take_over()
    return model


@takes_options(PlanOptions, DEFAULTS)
def plan(model: nn.Module, budget_gb: float, example_inputs: Any, **options: Unpack[PlanOptions]) -> Plan:
    """Plan a training step without running anything or changing the model, which may live on the "meta" device.

    Args:
        device: the card to plan for ("rtx-4090", "h100", …; default: the model's own, for a meta model the GPU of this
            machine or else its CPU). `backend="auto"` then means the backend of that card, and the plan says which.
        mesh: plan for one card of a cluster that trains by FSDP2 (`fully_shard` on each block and on the model):
            the sizes of "dp_shard", "dp_replicate" and "tp", as in `{"dp_shard": 64, "tp": 8}`. The example inputs are
            then one card's; the cards of a "tp" group share them. `Plan.cluster` has the time of the step and what
            bounds it. `precision` is then the dtype in which parameters are gathered: "auto" and "bf16", or "fp32".
        interconnect: the names of the links between the cards of the mesh, within a node of eight cards and between
            nodes: "nvlink4+ib-ndr", or "nvlink4" for a single node.
        tp_plan: with "tp" in mesh, how layers are split: a dict from patterns of module paths to "colwise", "rowwise"
            or "colwise_gather_output"; by default the model's own plan, which models of transformers have.
        options: as in `optimize`, which also lists the errors.
    """
    return _planned(model, check_options(budget_gb, **options)).plan(example_inputs)


def _planned(model: nn.Module, options: Options) -> Session:
    """A session that only plans: for `model`, or, where `options` has a cluster, for one card's part of it."""
    check_torch()
    return Session(model if options.cluster is None else options.cluster.one_card(model), options)


@takes_options(PlanOptions, DEFAULTS)
def frontier(
    model: nn.Module, example_inputs: Any, *, points: int = 40, **options: Unpack[PlanOptions]
) -> Frontier[Plan]:
    """The least added time for every budget, from the smallest that works to the peak with nothing recomputed.

    Like `plan`, it runs nothing and changes nothing, and the model may live on the "meta" device. The step is captured
    once. `Plan.frontier` gives the same curve without a second capture.

    Args:
        points: how many budgets to solve for, half of them evenly spaced and half near the smallest. The peaks that
            well-known recipes reach, such as checkpointing every block, are solved for as well.
        options: as in `plan`. `limit_seconds` is shared among all budgets.
    """
    check_points(points)
    checked = check_options(_ROOMY_GB, **options)
    roomy = _planned(model, replace(checked, effort=DEFAULT_EFFORT)).plan(example_inputs)
    limit_seconds = checked.effort.limit_seconds if checked.effort.name == "best" else None
    return roomy.frontier(points, effort=checked.effort.name, limit_seconds=limit_seconds)


@takes_options(PlanOptions, DEFAULTS)
def max_batch(
    model: nn.Module,
    budget_gb: float,
    make_inputs: Callable[[int], Any],
    *,
    multiple_of: int = 1,
    at_most: int | None = None,
    max_added_time: float | None = None,
    **options: Unpack[PlanOptions],
) -> int:
    """The largest batch whose training step fits, found by planning: nothing is run, `model` may be on "meta".

    A step of the batch size returned fits, and one of the next multiple of `multiple_of` does not, or is above
    `at_most`. At the largest size that fits, operators may be recomputed several times over: `max_added_time` limits
    that.

    Args:
        make_inputs: `make_inputs(size)` gives the example inputs of a batch of that size as `plan` takes them, "meta"
            tensors too.
        multiple_of: only multiples of this are tried.
        at_most: the largest size to try; None for no limit.
        max_added_time: the most that a plan may add, as a fraction of the time of the step with nothing recomputed
            (0.3: 30%), by the time model; None for no limit.
        options: as in `plan`.

    Raises:
        BudgetError: not even a batch of `multiple_of` fits.
        ValueError: a batch of `multiple_of` adds more than `max_added_time`, or memory does not grow with the size;
            other errors are as in `plan`.
    """
    step = positive_int("multiple_of", multiple_of)
    most = None if at_most is None else positive_int("at_most", at_most)
    checked = check_options(budget_gb, **options)
    if not callable(make_inputs):
        raise TypeError(f"make_inputs must be a function from a size to example inputs, not {make_inputs!r}")
    call = _planned(model, checked)
    added = math.inf if max_added_time is None else check_share("max_added_time", max_added_time)

    def plan(size: int) -> Plan:
        return call.plan(make_inputs(size), advise=False)

    def estimate(size: int) -> int:
        return call.estimated_bytes(make_inputs(size))

    return largest_size(plan, checked.budget_bytes, step, most, added, estimate)


@takes_options(PlanOptions, DEFAULTS)
def max_length(
    model: nn.Module,
    budget_gb: float,
    make_inputs: Callable[[int], Any],
    *,
    multiple_of: int = 1,
    at_most: int | None = None,
    max_added_time: float | None = None,
    **options: Unpack[PlanOptions],
) -> int:
    """The longest sequence whose training step fits, found by planning: nothing is run, `model` may be on "meta".

    A step of the length returned fits, and one of the next multiple of `multiple_of` does not, or is above `at_most`.
    Where attention holds its matrix of scores, memory grows with the square of the length, and the search makes a few
    more plans than `max_batch`.

    Args:
        make_inputs: `make_inputs(length)` gives the example inputs of one batch as `plan` takes them: always the same
            number of sequences, all of `length` tokens. Give `at_most` where the model limits the length.
        multiple_of: only multiples of this are tried (64, say, for kernels that need it).
        at_most: the longest length to try; None for no limit.
        max_added_time: as in `max_batch`.
        options: as in `plan`.

    Raises:
        BudgetError, ValueError: as in `max_batch`.
    """
    limits: Any = {"multiple_of": multiple_of, "at_most": at_most, "max_added_time": max_added_time}
    return max_batch(model, budget_gb, make_inputs, **limits, **options)


def plan_of(model: nn.Module) -> Plan:
    """The plan of an optimised model's latest training call, or of its `example_inputs` before the first one. If that
    call has no plan because its sizes are still too rare to be planned, the latest plan before it.

    If the latest call ran as the plain model, because its step fits the budget, it is planned now, which may raise
    `CaptureError` or `BudgetError`. Raises `ValueError` for a model that is not optimised, has not been planned yet, or
    trains with activation checkpoints because no plan of its regions fits.
    """
    session = _session(model)
    latest = session.latest
    if session.none_fits:
        raise ValueError(f"{type(model).__name__} trains without a plan: {session.status.reason}")
    if latest is None:
        raise ValueError("nothing is planned yet: run a training step, or give optimize its example_inputs")
    return latest


def status(model: nn.Module) -> Status:
    """The status of an optimised model's training calls under memopt; `str()` of it is one line.

    Its `state` is a `memopt.State`: new, recording, planned, plain (the step fits the budget without a plan),
    checkpointed, unplanned or refused; `reason` says why, and `plan` is the latest plan. Reading the status makes no
    plan. Raises `ValueError` for a model that is not optimised.
    """
    return _session(model).status


def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, wrapped by the levers on the optimizer that the plan of an optimised model uses.

    If the plan uses none, `optimizer` itself is returned; with "bf16_parameters", the model's parameters become
    bfloat16. Train with the returned optimizer, and give it to schedulers and `TrainStep`. Raises `ValueError` for a
    model that is not optimised, and for an optimizer that these levers cannot wrap."""
    session = _session(model)
    return apply_levers(session.chosen, session.model, optimizer)


def _session(model: nn.Module) -> Session:
    """The session of an optimised model. Raises `ValueError` for a model that is not optimised."""
    session = session_of(model)
    if session is None:
        raise ValueError(f"this {type(model).__name__} is not optimised; call memopt.optimize first")
    return session


def remove(model: Model) -> Model:
    """Turn an optimised model back into the plain one, in place, and return it; a plain model is left as it is."""
    unwatch(model)
    if (session := session_of(model)) is not None:
        session.give_back()
    return model


def training_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch by the `loss_fn` that the model was optimised with, computed with the model as one planned
    region. The batch is `(inputs, targets)`, or whatever a `loss_fn` that takes the model expects. Raises `ValueError`
    for a model that was not optimised with a `loss_fn`."""
    session = session_of(model)
    if session is None or session.with_loss is None:
        raise ValueError("training_loss needs a model optimised with a loss_fn; without one, call the model itself")
    loss: torch.Tensor = session.loss(batch, model)
    return loss

"""Runs a training loop plain and with memopt's one line, and compares what they did."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import memopt
from memopt.errors import GIB, round_up
from memopt.meter import resident_cpu_blocks
from tests.loops.loop import Loop, values

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"precision": "fp32", "allow": {"recompute", "reinplace"}},
    "default": {},
}
SHARES = {"half": 1 / 2, "third": 1 / 3}
ROUNDING = 1e-5, 1e-3
"""The largest differences that rounding explains after all steps: of a loss, as a share of the largest, and of the
weights, as a share of the way that they went (optimizers that divide by small gradients widen it)."""
ROUNDED = "the same bits as in eager mode"
"""In the notes of a plan whose operators round in another way than eager mode's."""
TRIES = 3
"""A budget that a first refusal names must work at the second try; a third one says how far off it was."""


@dataclass
class Run:
    """A loop's run: by step its losses, the most bytes held, CPU seconds; and its weights and buffers at the end."""

    losses: list[dict[str, float]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    held: int = 0
    """The most bytes held at the end of a step: what is there without any activations."""
    others_peak: int = 0
    """The most bytes that other code held in a step before the models' first forward, as a teacher does: no plan lowers
    it."""
    seconds: list[float] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    first_states: list[dict[str, Any]] = field(default_factory=list)
    added: float = 0.0
    """The largest added time of the plans, as a share of their steps."""
    notes: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.peaks)

    def budget_gb(self, share: float) -> float:
        """The budget that leaves `share` of this plain run's activations, and room for what other code holds."""
        return max(self.held + share * (self.peak - self.held), self.others_peak) / GIB

    @property
    def later_seconds(self) -> float:
        """The median of the steps after the first third."""
        return median(self.seconds[len(self.seconds) // 3 :])


def run(
    loop: Loop, optimize: Callable[..., Any] | None = None, *, metered: bool = True, done: Run | None = None
) -> Run:
    """Run the loop with `optimize`, plain without. Raises what the loop raises; `done` has the steps until then."""
    done, optimized = done or Run(), []
    meter: list[memopt.measure_peak] = []
    gc.collect()
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)

    def begin() -> None:
        if metered:
            meter.append(memopt.measure_peak("cpu").__enter__())
        start[0] = time.process_time()

    def model_begins(*_: Any) -> None:
        """End what other code has held in a step, which is over where the first model is called."""
        if not peaks:
            (peak := meter.pop()).__exit__(None, None, None)
            peaks.append(peak.bytes)
            done.others_peak = max(done.others_peak, peak.bytes)
            meter.append(memopt.measure_peak("cpu").__enter__())

    def log(**losses: Any) -> None:
        seconds = time.process_time() - start[0]
        end(is_step=bool(losses))
        if losses:
            done.seconds.append(seconds)
            done.losses.append(values(losses))
        if metered and optimize is None:
            missing = (p for model in optimized for p in model.parameters() if p.requires_grad and p.grad is None)
            done.held = max(done.held, sum(resident_cpu_blocks().values()) + sum(p.nbytes for p in missing))
        begin()

    def end(*, is_step: bool) -> None:
        if metered:
            (peak := meter.pop()).__exit__(None, None, None)
            done.peaks += [max(peak.bytes, *peaks, 0)] * is_step
            peaks.clear()

    def noted(model: Any, **options: Any) -> Any:
        """Optimise a model, or what a trainer trains, by the callback of `memopt.integrations`."""
        optimized.append(getattr(model, "model", model) if hasattr(model, "add_callback") else model)
        done.first_states.append(_state(optimized[-1]))
        if metered and optimize is None:
            optimized[-1].register_forward_pre_hook(model_begins)
        return model if optimize is None else optimize(model, **options)

    start, peaks = [0.0], list[int]()
    begin()
    try:
        loop.train(noted, log)
    finally:
        end(is_step=False)
    done.states = [_state(model) for model in optimized]
    if optimize is not None:
        for model in optimized:
            with suppress(ValueError):  # the callback of a trainer gives the plain model back at the end
                status = memopt.status(model)
                done.statuses.append(str(status))
                if (plan := status.plan) is not None:
                    done.added = max(done.added, plan.added_time)
                    done.notes += plan.notes
    return done


def one_line(model: Any, budget_gb: float, **options: Any) -> Any:
    """The one line, as docs/ has it for loops and for the trainers of transformers and TRL."""
    if not hasattr(model, "add_callback"):
        return memopt.optimize(model, budget_gb, **options)
    from memopt.integrations.transformers import MemoptCallback

    model.add_callback(MemoptCallback(budget_gb, **options))
    return model


def _state(model: nn.Module) -> dict[str, Any]:
    """The weights and buffers as arrays of numpy, which are no tensors of the process."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return {name: _dense(value.detach()).numpy().copy() for name, value in tensors.items()}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


@dataclass
class Outcome:
    """A loop run with one set of options within one budget, beside the plain one."""

    loop: str
    options: str
    share: str
    verdict: str = ""
    """"bitwise", "rounding", "close" (16 bits, within the loop's tolerances), "refused" (before the first step, in
    words, since it cannot be captured), or the fault in words."""
    plain_mb: float = 0.0
    held_mb: float = 0.0
    budgets_mb: list[float] = field(default_factory=list)
    """The budget that was asked for, and those that refusals named one after the other."""
    refused_in: list[int] = field(default_factory=list)
    """The steps, from 0, in which these were refused."""
    peak_mb: float = 0.0
    over: list[int] = field(default_factory=list)
    """The steps, from 0, that held more than the budget."""
    loss_off: float = 0.0
    way_off: float = 0.0
    plain_ms: float = 0.0
    planned_ms: float = 0.0
    added: float = 0.0
    said: list[str] = field(default_factory=list)
    """The refusals, or the error."""
    states: list[str] = field(default_factory=list)
    """The status of each model after the last step, and the notes of its plan."""

    @property
    def right(self) -> bool:
        return self.verdict in ("bitwise", "rounding", "close")


def outcome(loop: Loop, plain: Run, options: str, share: str, *, timed: bool = False) -> Outcome:
    """Run the loop within a share of the plain activations, and again at what a refusal names."""
    found = Outcome(loop.name, options, share, plain_mb=plain.peak / 2**20, held_mb=plain.held / 2**20)
    budget = plain.budget_gb(SHARES[share])
    while True:
        found.budgets_mb.append(budget * 1024)
        optimize = partial(one_line, budget_gb=budget, **OPTIONS[options])
        ran = Run()
        try:
            run(loop, optimize, done=ran)
            break
        except memopt.BudgetError as refusal:
            found.said.append(f"step {len(ran.losses)}: {refusal}")
            found.refused_in.append(len(ran.losses))
            budget = float(round_up(refusal.smallest_gb))
            if len(found.said) == TRIES:
                found.verdict = "named budgets do not work"
                return found
        except Exception as error:  # whatever ends a loop that trains plain is the finding
            found.said.append(f"step {len(ran.losses)}: {type(error).__name__}: {error}")
            refused = isinstance(error, memopt.CaptureError) and not ran.losses
            found.verdict = "refused" if refused else f"ended by {type(error).__name__}"
            return found
    _compare(found, loop, plain, ran)
    if timed and found.right:
        found.planned_ms = 1000 * run(loop, optimize, metered=False).later_seconds
        found.plain_ms = 1000 * run(loop, metered=False).later_seconds
    return found


def _compare(found: Outcome, loop: Loop, plain: Run, ran: Run) -> None:
    """Fill in the figures of a run that came to its end, and the verdict."""
    found.peak_mb, found.added = ran.peak / 2**20, ran.added
    found.loss_off, found.way_off = _loss_off(plain, ran), _way_off(plain, ran)
    found.states, budget = ran.statuses + ran.notes, round(found.budgets_mb[-1] * 2**20)
    found.over = [step for step, peak in enumerate(ran.peaks) if peak > budget]
    exact = found.options == "exact"
    named = loop.rounding or any(ROUNDED in note for note in ran.notes)
    close = ROUNDING if exact else (loop.loss_tolerance, loop.way_tolerance)
    if not _within(found, close) and (exact or not _within(found, _off_in_autocast(loop, plain))):
        found.verdict = "wrong numbers"
    elif exact and not named and (found.loss_off or found.way_off):
        found.verdict = "not bitwise"
    elif found.over:
        found.verdict = "over budget"
    elif len(found.said) > 1 and not (loop.unforeseen and found.refused_in == sorted(set(found.refused_in))):
        found.verdict = "a named budget does not work"
    elif found.budgets_mb[-1] > found.plain_mb:
        found.verdict = "named more than plain"
    elif exact:
        found.verdict = "rounding" if found.loss_off or found.way_off else "bitwise"
    else:
        found.verdict = "close"


def _within(found: Outcome, limits: tuple[float, float]) -> bool:
    return found.loss_off <= limits[0] and found.way_off <= limits[1]


def _off_in_autocast(loop: Loop, plain: Run) -> tuple[float, float]:
    """How far the losses and weights of the plain loop are off within `torch.autocast`, which is what 16 bits do to
    it."""
    ran = run(loop, in_autocast, metered=False)
    return _loss_off(plain, ran), _way_off(plain, ran)


def in_autocast(model: Any, **_: Any) -> Any:
    """The model with training forwards in bf16 by `torch.autocast`, whose outputs have the dtypes that they have
    without it."""
    inner = getattr(model, "model", model) if hasattr(model, "add_callback") else model
    own = inner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not inner.training:
            return own(*args, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            result = own(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda one: one.float() if one.dtype == torch.bfloat16 else one, result)

    inner.forward = forward
    return model


def _loss_off(plain: Run, ran: Run) -> float:
    """The largest difference of a loss, as a share of the largest one of its name."""
    if [step.keys() for step in plain.losses] != [step.keys() for step in ran.losses]:
        return float("inf")
    names = {name for step in plain.losses for name in step}
    worst = 0.0
    for name in names:
        pairs = [(ours[name], step[name]) for ours, step in zip(ran.losses, plain.losses, strict=True) if name in step]
        scale = max(abs(theirs) for _, theirs in pairs) or 1.0
        worst = max([worst, *(abs(ours - theirs) / scale for ours, theirs in pairs if ours != theirs)])
    return worst


def _way_off(plain: Run, ran: Run) -> float:
    """The distance between the last weights of both runs, as a share of the way from the first weights.

    The largest over the models, each taken as one vector."""
    worst = 0.0
    for first, theirs, ours in zip(plain.first_states, plain.states, ran.states, strict=True):
        off = _distance(theirs, ours)
        way = _distance(theirs, first) if first.keys() == theirs.keys() else 1.0
        worst = max(worst, off / way if off else 0.0)
    return worst


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    numbers = (abs(a[name].astype(complex) - b[name]) for name in a)
    return float(numpy.sqrt(sum(float(numpy.square(difference).sum()) for difference in numbers)))

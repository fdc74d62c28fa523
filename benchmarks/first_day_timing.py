"""Times and peaks of training steps on a card, for `benchmarks.first_day`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import memopt
from benchmarks.gpu_methods import Method, adamw, lasting_bytes
from benchmarks.gpu_models import Candidate, made
from memopt.device.hardware import assumed_context
from memopt.errors import GIB

STEPS, WARM = 20, 3
BESIDE = ("eager, per block", "compile, per block", "compile")
"""The ways to train beside which memopt is timed."""
TIGHT = 0.9
"""The tighter budget, as a share of what torch.compile reserved."""


def budgets_beside(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The budgets in GB in which memopt is timed, by name, from the figures of the ways in `BESIDE` that trained."""
    trained = {name: found[name] for name in BESIDE if "reserved_gb" in found.get(name, {})}
    context_gb = assumed_context(torch.cuda.get_device_capability()[0]) / GIB
    budgets = {name: figures["reserved_gb"] + context_gb for name, figures in trained.items()}
    if "compile" in budgets:
        compiled = trained["compile"]
        activations = compiled["peak_gb"] - compiled["held_gb"]
        whole = budgets.pop("compile")
        budgets[f"{TIGHT} of compile"] = TIGHT * compiled["reserved_gb"] + context_gb
        budgets["compile less half of its activations"] = whole - activations / 2
    return budgets


def timed(method: Method, candidate: Candidate) -> dict[str, Any]:
    """The figures of `steps_timed` for a way to train, or why it failed."""

    def run() -> dict[str, Any]:
        model, batch = made(candidate)
        method.prepare(model, candidate)
        with method.settings():
            return steps_timed(model, batch, adamw(model), lambda: method.autocast("cuda"))

    try:
        return _or_failure(run)
    finally:
        forget()


def timed_within(budgets_gb: Mapping[str, float], candidate: Candidate) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of `steps_timed` for memopt through inductor within each of the budgets, by their names. All plans
    are made from one capture."""
    model, batch = made(candidate)
    optimizer = adamw(model)
    for name, budget_gb in budgets_gb.items():

        def run(budget_gb: float = budget_gb) -> dict[str, Any]:
            optimizer.state.clear()
            free()
            memopt.optimize(model, budget_gb, precision="bf16", backend="inductor", optimizer=optimizer)
            return {"budget_gb": budget_gb, **steps_timed(model, batch, optimizer)}

        yield name, _or_failure(run)
        optimizer.zero_grad()


def steps_timed(
    model: torch.nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """Median and quartiles of steps whose forwards run in the context `around`, the allocator's peaks, and the bytes of
    parameters, batch and the optimizer's state."""

    def step() -> None:
        optimizer.zero_grad()
        with around():
            output = model(**batch)
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        optimizer.step()

    for _ in range(WARM):
        step()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    times = [by_events(step) for _ in range(STEPS)]
    low, median, high = statistics.quantiles(times, n=4)
    peak, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    held = lasting_bytes(model, optimizer, batch) / GIB
    figures = {"low_ms": low, "median_ms": median, "high_ms": high}
    return figures | {"peak_gb": peak, "reserved_gb": reserved, "held_gb": held}


def by_events(run: Callable[[], Any]) -> float:
    """Milliseconds between two events around a run; of the clock where the card has none."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    clock = time.perf_counter()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) or 1e3 * (time.perf_counter() - clock)


def forget() -> None:
    """Drop compiled code, and give free memory back to the card."""
    torch._dynamo.reset()
    free()


def free() -> None:
    """Give free memory back to the card."""
    gc.collect()
    torch.cuda.empty_cache()


def _or_failure(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except (RuntimeError, ValueError, AssertionError) as failure:
        return {"failure": f"{type(failure).__name__}: {str(failure)[:200]}"}

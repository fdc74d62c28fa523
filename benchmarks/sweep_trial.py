"""One architecture of the sweep: its plain twin beside its planned one, step by step from equal seeds."""

from __future__ import annotations

import contextlib
import copy
import io
import time
import warnings
from statistics import median
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import nn

import memopt
from benchmarks.quick_kernels import quick_kernels
from benchmarks.small_architectures import NotBuilt, build
from examples.models.random_reference import CONDITIONED, nudge, rounding_is_named
from examples.models.twins import (
    EXACT,
    FLOOR,
    FUSED_FLOOR,
    REFUSALS,
    ROUNDING,
    NoLoss,
    Run,
    Twin,
    difference,
    gradients_apart,
    said,
    scale_weights,
    verdict_of,
    where,
)
from memopt.errors import GIB

DEFAULT: dict[str, Any] = {"elsewhere_gb": 0}
FUSED: dict[str, Any] = {**EXACT, "backend": "inductor"}
STAGES = {"mid": (EXACT, 0.5), "smallest": (EXACT, 0.0), "default": (DEFAULT, 0.5), "inductor": (FUSED, 0.5)}
"""By name: options, and where the budget lies between the smallest that works (0) and the plain peak (1)."""
DEFAULT_LOSS, OF_AUTOCAST = 0.05, 1.5
"""How far the losses of the default options may be from the plain model's; where they are further off, how far the
gradients of the first step may be, in multiples of the difference under `torch.autocast`: a rounding there may change
the second step's loss by much, where a model matches its results to labels."""
MOST_ROUNDED = 0.1
"""How far numbers through inductor in fp32 may be from the plain ones where those in fp64 are equal: its code for batch
normalisation loses digits, more as the model is trained."""
DRAWS, CHANGE = 5, 0.02
"""How many times, and by which share, weights are changed at random where gradients are further off even so: one match
that turns out otherwise moves them by much, in plain PyTorch under autocast as well, and the medians are compared."""


def trial(name: str, stages: list[str]) -> dict[str, Any]:
    """Return a record by stage of the sweep, or one with the reason why the model was not built."""
    started = time.time()
    warnings.simplefilter("ignore")
    try:
        model, batch = build(name)
        plain = plain_run(model, batch)
    except (NotBuilt, NoLoss) as reason:
        return {"verdict": "not built", "message": str(reason)}
    except Exception as error:
        return {"verdict": "not built", "message": f"plain PyTorch: {said(error)}"}
    record: dict[str, Any] = {}
    for stage in stages:
        options, share = STAGES[stage]
        began = time.time()
        try:
            with quick_kernels(), inductor_config.patch(fallback_random=True):  # dropout draws as in eager mode
                found = planned(stage, copy.deepcopy(model), batch, plain, options, share)
                if stage == "inductor" and found["verdict"] == "wrong" and farthest(found) < MOST_ROUNDED:
                    found |= in_fp64(copy.deepcopy(model), batch)
        except REFUSALS as refused:
            found = {"verdict": "refused", "message": said(refused)}
        except Exception as error:
            found = {"verdict": "error not ours", "message": said(error), "where": where(error)}
        record[stage] = {**found, "seconds": round(time.time() - began, 1)}
    if any(found["verdict"] in ("wrong", "refused", "error not ours") for found in record.values()):
        record["aot_eager"] = compiled(copy.deepcopy(model), batch, plain)
    return {**record, "seconds": round(time.time() - started, 1)}


def plain_run(model: nn.Module, batch: dict[str, Any]) -> Run:
    """The plain model's steps, taken twice.

    Raises `NotBuilt` where the two differ: then nothing can be compared."""
    runs = []
    for _ in range(2):
        twin = Twin(copy.deepcopy(model), batch)
        steps(twin)
        runs.append(twin.run)
    apart, at = difference(*runs)
    if apart:
        raise NotBuilt(f"the plain model gives other numbers each time: {at}")
    if not any(tensor is not None for name, tensor in runs[0].tensors.items() if "gradient" in name):
        raise NotBuilt("no parameter gets a gradient")
    return runs[0]


def steps(twin: Twin) -> None:
    """Two steps in a row."""
    twin.step("step 1")
    twin.step("step 2")


def planned(
    stage: str, model: nn.Module, batch: dict[str, Any], plain: Run, options: dict[str, Any], share: float
) -> dict[str, Any]:
    """One stage: verdict, difference, budget, prediction, measured peak."""
    untouched = copy.deepcopy(model)
    roomy = memopt.plan(model, 1000, batch, **options)
    smallest, plain_peak = roomy.smallest_gb(), roomy.plain_peak_gb
    del roomy
    budget = max(smallest, smallest + share * (plain_peak - smallest))
    memopt.optimize(model, budget, example_inputs=batch, **options)
    twin = Twin(model, batch)
    steps(twin)
    found: dict[str, Any] = {"budget_mb": budget * 1024, "smallest_mb": smallest * 1024, "plain_mb": plain_peak * 1024}
    twin.measured_bytes()  # numbers of other threads and caches of torch come with the first
    measured = twin.measured_bytes() / GIB
    plan = memopt.plan_of(model)
    found |= {"measured_mb": measured * 1024, "predicted_mb": plan.predicted_peak_gb * 1024}
    found["over"] = plan.predicted_peak_gb / measured - 1
    found["over_less_reserve"] = (plan.predicted_peak_gb - plan.account.reserve / GIB) / measured - 1
    verdict, apart, at = judged(stage, twin.run, plain)
    if apart:
        found |= {"difference": apart, "at": at}
    if options is EXACT and verdict == "wrong" and rounding_is_named(plan.notes):
        found["nudged"] = nudged_apart(copy.deepcopy(untouched), batch, plain)
        verdict, _, _ = judged(stage, twin.run, plain, CONDITIONED * found["nudged"])
    if stage == "default" and verdict == "wrong":
        autocast = gradients_apart(under_autocast(copy.deepcopy(untouched), batch), plain)
        found |= {"gradients": gradients_apart(twin.run, plain), "autocast_gradients": autocast}
        near = found["gradients"] < OF_AUTOCAST * autocast
        if not near:
            found["median_gradients"], found["median_autocast"] = with_other_weights(model, untouched, batch)
            near = found["median_gradients"] < OF_AUTOCAST * found["median_autocast"]
        verdict = "right" if near else verdict
    if verdict != "wrong" and measured > budget:
        verdict = "over budget"
    if verdict in ("right", "rounding"):
        found |= accumulation(twin, untouched, batch, stage, CONDITIONED * found.get("nudged", 0.0))
    return {"verdict": verdict, **found}


def nudged_apart(model: nn.Module, batch: dict[str, Any], plain: Run) -> float:
    """How far the plain model's numbers are from those of weights that are one unit in the last place larger."""
    nudge(model)
    twin = Twin(model, batch)
    steps(twin)
    return difference(twin.run, plain)[0]


def under_autocast(model: nn.Module, batch: dict[str, Any]) -> Run:
    """The same steps of the plain model under `torch.autocast` in bf16."""
    twin = Twin(model, batch, torch.autocast("cpu", torch.bfloat16)(model.__call__))
    steps(twin)
    return twin.run


def in_fp64(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The verdict on a model in double precision through inductor, and how far it is from the plain one. What was
    rounding in fp32 is nearly gone there."""
    torch._dynamo.reset()
    doubled = {name: value.double() if _is_float(value) else value for name, value in batch.items()}
    options, share = STAGES["inductor"]
    found = planned("inductor", copy.deepcopy(model.double()), doubled, plain_run(model, doubled), options, share)
    kept = {key: found[key] for key in ("verdict", "accumulation") if key in found}
    return kept | {"fp64_difference": farthest(found)}


def farthest(found: dict[str, Any]) -> float:
    """The largest difference of a stage from the plain model's numbers."""
    return max(found.get("difference", 0.0), found.get("accumulation_difference", 0.0))


def _is_float(value: Any) -> bool:
    return torch.is_tensor(value) and value.dtype == torch.float32


def with_other_weights(model: nn.Module, untouched: nn.Module, batch: dict[str, Any]) -> tuple[float, float]:
    """How far a planned model's gradients are from the plain ones, and how far those under autocast are: the medians
    over models whose weights differ at random from those of the `untouched` one."""
    ours, autocast = [], []
    for number in range(DRAWS):
        changed = copy.deepcopy(untouched)
        scale_weights(changed, CHANGE, number)
        take_state(model, changed)
        plain, twin = Twin(copy.deepcopy(changed), batch), Twin(model, batch)
        for one in (plain, twin):
            one.step("step 1")
        ours.append(gradients_apart(twin.run, plain.run))
        autocast.append(gradients_apart(under_autocast(changed, batch), plain.run))
    return median(ours), median(autocast)


def take_state(model: nn.Module, other: nn.Module) -> None:
    """Set a model's parameters and buffers to those of another one."""
    state = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            value.copy_(state[name])


def judged(stage: str, ours: Run, plain: Run, rounding: float = 0.0) -> tuple[str, float, str]:
    """The verdict on the numbers of a planned run, how far they are from the plain ones, and where. Up to `rounding`
    counts as rounding, too, where it is larger than what does without."""
    if stage == "default":
        pairs = zip(ours.losses, plain.losses, strict=True)
        apart = max(abs(loss - reference) / max(abs(reference), 1e-30) for loss, reference in pairs)
        return "right" if apart < DEFAULT_LOSS else "wrong", apart, "loss"
    apart, at = difference(ours, plain, FUSED_FLOOR if stage == "inductor" else FLOOR)
    verdict = "rounding" if ROUNDING <= apart <= rounding else verdict_of(apart)
    return "right" if stage == "inductor" and verdict == "rounding" else verdict, apart, at


def accumulation(
    twin: Twin, untouched: nn.Module, batch: dict[str, Any], stage: str, rounding: float
) -> dict[str, Any]:
    """A step of two forwards and backwards, beside one of the `untouched` model from the same state; a budget too small
    for it is no fault, nor is a difference of at most `rounding`."""
    plain = Twin(untouched, batch)
    steps(plain)  # what a forward does only the first time is over for both
    take_state(untouched, twin.model)
    plain.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
    plain.run = Run([], {}, [])
    plain.step("accumulated", 2)
    twin.run = Run([], {}, [])
    try:
        twin.step("accumulated", 2)
    except memopt.BudgetError as refused:
        return {"accumulation": f"needs {refused.smallest_gb * 1024:.2f} MB"}
    verdict, apart, at = judged(stage, twin.run, plain.run, rounding)
    if stage == "default" or verdict == "right":
        return {"accumulation": "right"}
    return {"accumulation": verdict, "accumulation_at": at, "accumulation_difference": apart} | (
        {"verdict": "wrong"} if verdict == "wrong" else {}
    )


def compiled(model: nn.Module, batch: dict[str, Any], plain: Run) -> str:
    """Say whether torch.compile trains the model, graph breaks allowed, and how far its values are from plain ones."""
    try:
        torch._dynamo.reset()
        with contextlib.redirect_stdout(io.StringIO()):
            twin = Twin(model, batch, torch.compile(model, backend="aot_eager"))
            steps(twin)
    except Exception as error:
        return f"fails: {said(error)[:100]}"
    apart, at = difference(twin.run, plain)
    return f"trains, {'bitwise' if not apart else f'{apart:.1e} off: {at}'}"

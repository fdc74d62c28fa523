"""One architecture of the sweep: its plain twin beside its planned one, step by step from equal seeds."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import random
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

import memopt
from benchmarks.small_architectures import NotBuilt, build
from memopt.account.account import distinct_bytes
from memopt.errors import GIB
from memopt.meter import measure_peak

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
DEFAULT: dict[str, Any] = {"elsewhere_gb": 0}
STAGES = {"mid": (EXACT, 0.5), "smallest": (EXACT, 0.0), "default": (DEFAULT, 0.5)}
"""By name: options, and where the budget lies between the smallest that works (0) and the plain peak (1)."""
ROUNDING = 1e-5
FLOOR = 1e-3
"""The smallest scale of a value for its relative difference, as a share of the largest of its kind."""
DEFAULT_LOSS = 0.05
"""How far the losses of the default options may be from the plain model's."""
REFUSALS = (memopt.BudgetError, memopt.CaptureError, memopt.UnplannedGradientError, memopt.StaleOutputError)
MESSAGE = 200


@dataclass(frozen=True)
class Run:
    """The results of one twin's steps: losses, gradients, buffers, parameters, the next random numbers."""

    losses: list[float]
    tensors: dict[str, torch.Tensor | None]
    numbers: list[tuple[float, float, float]]


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def loss_of(outputs: Any) -> torch.Tensor:
    loss = outputs["loss"] if hasattr(outputs, "keys") else outputs[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NotBuilt("its forward returns no loss to differentiate")
    return loss.sum() if loss.dim() else loss


class Twin:
    """A model with its optimiser, stepped from equal seeds."""

    def __init__(self, model: nn.Module, batch: dict[str, Any], call: Callable[..., Any] | None = None) -> None:
        self.model, self.batch, self.call = model, batch, model if call is None else call
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.run = Run([], {}, [])

    def step(self, name: str, forwards: int = 1) -> None:
        """One step of the optimiser after `forwards` forwards and backwards; all that is compared is kept in `run`."""
        for _ in range(forwards):
            seed()
            loss = loss_of(self.call(**self.batch))
            loss.backward()
            self.run.losses.append(float(loss.detach()))
            self.run.numbers.append((float(torch.rand([])), random.random(), float(numpy.random.rand())))
            del loss
        for key, parameter in self.model.named_parameters():
            self.run.tensors[f"{name}: gradient of {key}"] = None if parameter.grad is None else parameter.grad.clone()
        for key, buffer in self.model.named_buffers():
            self.run.tensors[f"{name}: buffer {key}"] = buffer.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for key, parameter in self.model.named_parameters():
            self.run.tensors[f"{name}: parameter {key}"] = parameter.detach().clone()

    def measured_bytes(self) -> int:
        """The most that one more step holds, parameters, batch and the optimiser's state included."""
        state = [value for one in self.optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(self.batch) if torch.is_tensor(leaf)]
        held = distinct_bytes([*self.model.parameters(), *self.model.buffers(), *tensors, *state])
        seed()
        gc.collect()
        with measure_peak("cpu") as peak:
            loss = loss_of(self.call(**self.batch))
            loss.backward()
            del loss
            self.optimizer.step()
            self.optimizer.zero_grad()
        return peak.allocated_bytes + held


def difference(ours: Run, plain: Run) -> tuple[float, str]:
    """Return the largest difference over the plain value's largest magnitude, and where it is; 0 if bitwise equal.

    Where the first step's loss, gradients and buffers differ, these are it: AdamW makes any rounding of a gradient
    near zero a difference of its whole step.
    """
    first = next(iter(plain.tensors)).partition(":")[0]
    told = [name for name in plain.tensors if name.startswith(first) and ": parameter" not in name]
    found = max(_loss_apart(ours, plain, 0), *(_apart(ours, plain, name) for name in told))
    if found[0] == 0:
        losses = (_loss_apart(ours, plain, at) for at in range(len(plain.losses)))
        found = max(*losses, *(_apart(ours, plain, name) for name in plain.tensors))
    return max(found, (1.0, "the next random number")) if ours.numbers != plain.numbers else found


def _loss_apart(ours: Run, plain: Run, at: int) -> tuple[float, str]:
    mine, theirs = ours.losses[at], plain.losses[at]
    same = mine == theirs or (mine != mine and theirs != theirs)
    return (0.0, "") if same else (abs(mine - theirs) / max(abs(theirs), 1e-30), f"loss of forward {at + 1}")


def _apart(ours: Run, plain: Run, name: str) -> tuple[float, str]:
    mine, theirs = ours.tensors.get(name), plain.tensors[name]
    if mine is None or theirs is None:
        return (0.0, "") if mine is theirs else (1.0, f"{name}: {'none' if mine is None else 'given'}, unlike plain")
    if torch.equal(mine, theirs):
        return 0.0, ""
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return 1.0, f"{name}: not a number in other places"
    apart = _largest(mine.double() - theirs.double())
    return apart / max(_largest(theirs), FLOOR * _scale(plain, name), 1e-30), name


def _scale(plain: Run, name: str) -> float:
    """The largest magnitude among all values of the same kind in the same step.

    A gradient that is zero but for rounding (of the bias of keys, under softmax) has no scale of its own."""
    kind = " ".join(name.split()[:3])
    return max(_largest(value) for key, value in plain.tensors.items() if value is not None and key.startswith(kind))


def _largest(values: torch.Tensor) -> float:
    return float(values.double().abs().nan_to_num(0.0).max()) if values.numel() else 0.0


def trial(name: str, stages: list[str]) -> dict[str, Any]:
    """Return a record by stage of the sweep, or one with the reason why the model was not built."""
    started = time.time()
    warnings.simplefilter("ignore")
    try:
        model, batch = build(name)
        plain = plain_run(model, batch)
    except NotBuilt as reason:
        return {"verdict": "not built", "message": str(reason)}
    except Exception as error:
        return {"verdict": "not built", "message": f"plain PyTorch: {said(error)}"}
    record: dict[str, Any] = {}
    for stage in stages:
        options, share = STAGES[stage]
        began = time.time()
        try:
            found = planned(stage, copy.deepcopy(model), batch, plain, options, share)
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
    if stage == "default":
        apart = max(abs(o - p) / max(abs(p), 1e-30) for o, p in zip(twin.run.losses, plain.losses, strict=True))
        at = "loss"
        verdict = "right" if apart < DEFAULT_LOSS else "wrong"
    else:
        apart, at = difference(twin.run, plain)
        verdict = "right" if apart == 0 else "rounding" if apart < ROUNDING else "wrong"
    if apart:
        found |= {"difference": apart, "at": at}
    if verdict != "wrong" and measured > budget:
        verdict = "over budget"
    if verdict in ("right", "rounding"):
        found |= accumulation(twin, model, batch, stage)
    return {"verdict": verdict, **found}


def accumulation(twin: Twin, model: nn.Module, batch: dict[str, Any], stage: str) -> dict[str, Any]:
    """A step of two forwards and backwards from the plain model's state; a budget too small for it is no fault."""
    plain = Twin(memopt.remove(copy.deepcopy(model)), batch)
    plain.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
    plain.step("accumulated", 2)
    twin.run = Run([], {}, [])
    try:
        twin.step("accumulated", 2)
    except memopt.BudgetError as refused:
        return {"accumulation": f"needs {refused.smallest_gb * 1024:.2f} MB"}
    apart, at = difference(twin.run, plain.run)
    if stage == "default" or apart == 0:
        return {"accumulation": "right"}
    verdict = "rounding" if apart < ROUNDING else "wrong"
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


def said(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {' '.join(str(error).split())}"[:MESSAGE]


def where(error: BaseException) -> str:
    """The last line of memopt in the traceback, and the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" for frame in frames]
    ours = [place for place in places if "/memopt/" in place or "/passes/" in place]
    short = [place[max(place.rfind("/memopt/"), place.rfind("/passes/")) + 1 :] for place in ours]
    return " < ".join(dict.fromkeys(([places[-1]] if places else []) + short[-1:]))

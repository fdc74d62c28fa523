"""A model beside its twin, stepped from equal seeds, with all that is compared of their steps."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

import memopt
from memopt.account.account import distinct_bytes
from memopt.compat.operators import tree_leaves
from memopt.meter import measure_peak

EXACT: dict[str, Any] = {"precision": "fp32", "allow": {"recompute", "reinplace"}, "elsewhere_gb": 0}
"""Options under which all numbers are the plain model's."""
REFUSALS = (memopt.BudgetError, memopt.CaptureError, memopt.UnplannedGradientError, memopt.StaleOutputError)
ROUNDING = 1e-5
"""The largest relative difference that rounding explains."""
FLOOR = 1e-3
"""The smallest scale of a value for its relative difference, as a share of the largest of its kind."""
FUSED_FLOOR = 0.1
"""As `FLOOR`, for compiled code: sums that cancel, as in the gradient of a bias before a normalisation, leave rounding
of their terms in another order."""


@dataclass(frozen=True)
class Run:
    """The results of one twin's steps: losses, gradients, buffers, parameters, the next random numbers."""

    losses: list[float]
    tensors: dict[str, torch.Tensor | None]
    numbers: list[tuple[float, float, float]]


class NoLoss(ValueError):
    """The model's forward returns no loss."""


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def loss_of(outputs: Any) -> torch.Tensor:
    loss = outputs["loss"] if hasattr(outputs, "keys") else outputs[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise NoLoss("its forward returns no loss to differentiate")
    return loss.sum() if loss.dim() else loss


class Twin:
    """A model with its optimizer, stepped from equal seeds."""

    def __init__(self, model: nn.Module, batch: dict[str, Any], call: Callable[..., Any] | None = None) -> None:
        self.model, self.batch, self.call = model, batch, model if call is None else call
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.run = Run([], {}, [])

    def step(self, name: str, forwards: int = 1) -> None:
        """One step of the optimizer after `forwards` forwards and backwards; all that is compared is kept in `run`."""
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
        for key, value in self.batch.items():
            if torch.is_tensor(value):
                self.run.tensors[f"{name}: input {key}"] = value.detach().clone()
            if torch.is_tensor(value) and value.requires_grad:
                self.run.tensors[f"{name}: gradient of input {key}"], value.grad = value.grad, None
        self.optimizer.step()
        self.optimizer.zero_grad()
        for key, parameter in self.model.named_parameters():
            self.run.tensors[f"{name}: parameter {key}"] = parameter.detach().clone()

    def measured_bytes(self) -> int:
        """The most that one more step holds, parameters, batch and the optimizer's state included. The caller keeps the
        output until the optimizer has stepped, as a loop with `output = model(**batch)` does."""
        state = [value for one in self.optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
        tensors = [leaf for leaf in tree_leaves(self.batch) if torch.is_tensor(leaf)]
        held = distinct_bytes([*self.model.parameters(), *self.model.buffers(), *tensors, *state])
        seed()
        gc.collect()
        with measure_peak("cpu") as peak:
            output = self.call(**self.batch)
            loss_of(output).backward()
            self.optimizer.step()
            del output
            self.optimizer.zero_grad()
        return peak.allocated_bytes + held


def scale_weights(model: nn.Module, share: float, number: int) -> None:
    """Multiply each weight by a factor near one: normal, with `share` as its deviation, from a generator with the seed
    `number`. Complex weights change by their real and imaginary parts."""
    generator = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters():
            real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
            if real.is_floating_point():
                real.mul_(1 + share * torch.randn(real.shape, generator=generator))


def gradients_apart(ours: Run, plain: Run) -> float:
    """The norm of the difference of all gradients of the first step, over that of the plain ones; infinite where one of
    the two has a gradient that the other has not."""
    mine, reference = (
        {
            name: value
            for name, value in run.tensors.items()
            if name.startswith("step 1: gradient") and value is not None
        }
        for run in (ours, plain)
    )
    if mine.keys() != reference.keys():
        return float("inf")
    apart = sum(float((mine[name] - value).abs().double().square().sum()) for name, value in reference.items())
    whole = sum(float(value.abs().double().square().sum()) for value in reference.values())
    return float((apart / whole) ** 0.5) if whole else float(apart > 0)


def difference(ours: Run, plain: Run, floor: float = FLOOR) -> tuple[float, str]:
    """Return the largest difference over the plain value's largest magnitude, and where it is; 0 if bitwise equal. That
    magnitude is taken to be at least the share `floor` of the largest among all values of its kind.

    Where the first step's loss, gradients and buffers differ, these are it: AdamW makes any rounding of a gradient
    near zero a difference of its whole step.
    """
    first = next(iter(plain.tensors)).partition(":")[0]
    told = [name for name in plain.tensors if name.startswith(first) and ": parameter" not in name]
    found = max(_loss_apart(ours, plain, 0), *(_apart(ours, plain, name, floor) for name in told))
    if found[0] == 0:
        losses = (_loss_apart(ours, plain, at) for at in range(len(plain.losses)))
        found = max(*losses, *(_apart(ours, plain, name, floor) for name in plain.tensors))
    return max(found, (1.0, "the next random number")) if ours.numbers != plain.numbers else found


def _loss_apart(ours: Run, plain: Run, at: int) -> tuple[float, str]:
    mine, theirs = ours.losses[at], plain.losses[at]
    same = mine == theirs or (mine != mine and theirs != theirs)
    return (0.0, "") if same else (abs(mine - theirs) / max(abs(theirs), 1e-30), f"loss of forward {at + 1}")


def _apart(ours: Run, plain: Run, name: str, floor: float) -> tuple[float, str]:
    mine, theirs = ours.tensors.get(name), plain.tensors[name]
    if mine is None or theirs is None:
        return (0.0, "") if mine is theirs else (1.0, f"{name}: {'none' if mine is None else 'given'}, unlike plain")
    if torch.equal(mine, theirs):
        return 0.0, ""
    if not torch.equal(mine.isnan(), theirs.isnan()):
        return 1.0, f"{name}: not a number in other places"
    apart = _largest(mine.double() - theirs.double())
    return apart / max(_largest(theirs), floor * _scale(plain, name), 1e-30), name


def _scale(plain: Run, name: str) -> float:
    """The largest magnitude among all values of the same kind in the same step.

    What is zero but for rounding has no scale of its own: the gradient of the bias of keys, under softmax; the mean of
    a convolution of normalised values."""
    kind = _kind(name)
    return max(_largest(value) for key, value in plain.tensors.items() if value is not None and _kind(key) == kind)


def _kind(name: str) -> tuple[str, str, str]:
    """The step, what it is, and of a buffer its name within its module: those of one name have one unit."""
    step, _, rest = name.partition(": ")
    what, _, path = rest.partition(" ")
    return step, what, path.rpartition(".")[2] if what == "buffer" else ""


def _largest(values: torch.Tensor) -> float:
    return float(values.double().abs().nan_to_num(0.0).max()) if values.numel() else 0.0


def verdict_of(apart: float) -> str:
    """The verdict on the largest relative difference from the plain model's numbers."""
    return "right" if apart == 0 else "rounding" if apart < ROUNDING else "wrong"


def said(error: BaseException) -> str:
    """The error's class and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def where(error: BaseException) -> str:
    """The last line of memopt in the traceback, and the line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{frame.filename.split('site-packages/')[-1]}:{frame.lineno}" for frame in frames]
    ours = [place for place in places if "/memopt/" in place or "/passes/" in place]
    short = [place[max(place.rfind("/memopt/"), place.rfind("/passes/")) + 1 :] for place in ours]
    return " < ".join(dict.fromkeys(([places[-1]] if places else []) + short[-1:]))

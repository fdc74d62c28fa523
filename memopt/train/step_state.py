"""`TrainStep.state_dict`: everything but the model that the rest of a run depends on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from memopt.train.effective_batch import EffectiveBatch
from memopt.train.generators import random_state, set_random_state

if TYPE_CHECKING:
    from memopt.train.train_step import TrainStep

StateDict = dict[str, Any]
KEYS = {"number", "accumulate", "optimizers", "schedulers", "scaler", "effective_batch", "gradients", "generators"}


def state_of(step: TrainStep) -> StateDict:
    """The state as plain values and tensors; tensors are the live ones, as in torch's own state dicts."""
    parameters = step.parameters
    return {
        "number": step.number,
        "accumulate": step.accumulate,
        "optimizers": [each.state_dict() for each in step.optimizers],
        "schedulers": [each.state_dict() for each in step.schedulers],
        "scaler": step.scaling.scaler.state_dict() if step.scaling.adapts else None,
        "effective_batch": asdict(step.effective_batch),
        "gradients": [each.grad if step.effective_batch.calls else None for each in parameters],
        "generators": random_state({each.device for each in parameters}),
    }


def restore(step: TrainStep, state: StateDict) -> None:
    """Set `step` to `state`. Raises `ValueError` where they do not belong together, before anything is changed."""
    _check(step, state)
    for optimizer, saved in zip(step.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(step.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if step.scaling.adapts:
        step.scaling.scaler.load_state_dict(state["scaler"])
    empty = EffectiveBatch.empty(step.device)
    tensors = {
        name: value.to(step.device, empty.tokens.dtype)
        for name, value in state["effective_batch"].items()
        if isinstance(value, torch.Tensor)
    }
    step.effective_batch = EffectiveBatch(calls=state["effective_batch"]["calls"], **tensors)
    for parameter, gradient in zip(step.parameters, state["gradients"], strict=True):
        # A copy: the next backward adds to it.
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    step.number = state["number"]
    set_random_state(state["generators"], {each.device for each in step.parameters})


def _check(step: TrainStep, state: StateDict) -> None:
    missing = {
        "number",
        "accumulate",
        "optimizers",
        "schedulers",
        "scaler",
        "effective_batch",
        "gradients",
        "generators",
    }
    missing -= state.keys()
    if missing:
        raise ValueError(f"this is no state of a TrainStep: {', '.join(sorted(missing))} is missing")
    for name, own in (("optimizers", step.optimizers), ("schedulers", step.schedulers)):
        if len(state[name]) != len(own):
            raise ValueError(f"the state has {len(state[name])} {name}, this TrainStep {len(own)}; build it as it was")
    if (state["scaler"] is not None) != step.scaling.adapts:
        had, has = ("with", "without") if state["scaler"] is not None else ("without", "with")
        raise ValueError(f"the state is of a run {had} a GradScaler, this TrainStep is {has} one; build it as it was")
    if state["effective_batch"]["calls"] and state["accumulate"] != step.accumulate:
        raise ValueError(
            f"the state is from within an effective batch of {state['accumulate']} calls, this TrainStep has "
            f"accumulate={step.accumulate}; build it as it was, or save after a complete one"
        )
    shapes = [None if each is None else each.shape for each in state["gradients"]]
    own_shapes = [each.shape for each in step.parameters]
    if len(shapes) != len(own_shapes) or any(a not in (None, b) for a, b in zip(shapes, own_shapes, strict=True)):
        raise ValueError("the gradients of the state are of other parameters than this TrainStep's; build it as it was")

"""What an optimiser holds: its state for good, and the temporaries of its step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from memopt.account.live_bytes import LiveBytes
from memopt.account.optimizer_trial import OptimizerLike, fakes_of, parameters_of, trial
from memopt.compat.dispatch import plain_tensors
from memopt.compat.fakes import FakeTensor, FakeTensorMode
from memopt.compat.optim import eager_optimizers
from memopt.device.workspace_rules import SCALARS

# What a late step takes itself for: RAdam, for one, begins otherwise than it goes on.
_LATE_STEP = 1000


@dataclass(frozen=True)
class OptimizerAccount:
    """Bytes beside parameters and gradients."""

    state_bytes: int
    """Held from the first step on, between steps too."""
    step_temporary_bytes: int
    """Highest sum of what `step()` makes and frees again."""
    name: str
    """The optimiser's class and how it goes over the parameters, as in "AdamW (foreach)"; "none"."""


def optimizer_account(
    optimizer: OptimizerLike, parameters: Iterable[torch.Tensor], device_type: str | None = None
) -> OptimizerAccount:
    """Find what an optimiser holds by running three of its steps on fake tensors: any optimiser written with torch ops.

    Whether it loops over the parameters, or takes all at once (foreach, fused), is torch's own choice for the device.

    Args:
        optimizer: a class (its defaults), an instance (its own groups and options; it is left as it is), a
            `functools.partial` or another callable that takes the parameters, the name of a class of `torch.optim` in
            any case ("adamw"), or None for none.
        parameters: the model's parameters, real, fake or on "meta"; those with `requires_grad=False` count nothing.
            An instance's own parameters are used in their place.
        device_type: where the step will run, "cpu" or "cuda"; by default the device of the parameters (CPU for meta).

    Raises:
        ValueError: for an unknown name, an optimiser that needs a closure (LBFGS) or sparse gradients, or one that
            cannot be made from the parameters alone or whose step does not run on fake tensors.
    """
    if optimizer is None:
        return OptimizerAccount(0, 0, "none")
    given = parameters_of(optimizer) if isinstance(optimizer, Optimizer) else list(parameters)
    trained = [parameter for parameter in given if parameter.requires_grad]
    device_type = device_type or next((p.device.type for p in trained if p.device.type != "meta"), "cpu")
    try:
        return _tried(optimizer, trained, device_type, home=device_type)
    except _StepError:
        if device_type == "cpu":
            raise
    # A build of torch for the CPU alone cannot do all on fakes elsewhere: some ops ask for the device's driver.
    return _tried(optimizer, trained, device_type, home="cpu")


class _StepError(ValueError):
    """A step does not run on fakes."""


def _tried(optimizer: OptimizerLike, trained: list[torch.Tensor], device_type: str, home: str) -> OptimizerAccount:
    """Try the optimiser on fakes that lie on `home`, with the choices and the kernels of `device_type`."""
    count = LiveBytes(device_type, home)
    with plain_tensors(), FakeTensorMode(allow_non_fake_inputs=True), eager_optimizers(foreach=device_type != "cpu"):
        fakes = fakes_of(trained, torch.device(home))
        with count:  # some make their state when they are made
            on_fakes = trial(optimizer, fakes, torch.device(home))
        name = type(on_fakes).__name__
        _refuse(on_fakes, name)
        if not trained:
            return OptimizerAccount(0, 0, name)
        _run_steps(on_fakes, count, name)
        temporaries = max(0, count.peak - count.live) + SCALARS
        return OptimizerAccount(count.live, temporaries, f"{name} ({_way(count.kernels)})")


def _refuse(on_fakes: Optimizer, name: str) -> None:
    closure = inspect.signature(type(on_fakes).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the model inside its step (a closure), which cannot be planned; use another, or plan "
            "with optimizer=None and a budget less what it holds"
        )
    if isinstance(on_fakes, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} takes sparse gradients only, which cannot be planned; use Adam, and embeddings with sparse=False"
        )


def _run_steps(on_fakes: Optimizer, count: LiveBytes, name: str) -> None:
    """The first step makes the state, the second has it from its start, and the third takes itself for a late one."""
    try:
        for number in (None, None, _LATE_STEP):
            if number is not None:
                _set_step(on_fakes, number)
            with count:
                on_fakes.step()
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise _StepError(
            f"a step of {name} cannot be tried on fake tensors: {why}. Plan with optimizer=None, and a budget less "
            "what it holds"
        ) from error


def _set_step(on_fakes: Optimizer, number: int) -> None:
    """Set the optimiser's own count of its steps, where it is known by the name that torch's all use."""
    for state in on_fakes.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, torch.Tensor) and not isinstance(step, FakeTensor):
            with plain_tensors():
                step.fill_(number)
        elif isinstance(step, (int, float)):
            state["step"] = number


def _way(kernels: set[str]) -> str:
    """How the optimiser goes over its parameters, by the kernels that it called."""
    ways = {"_fused_": "fused", "_foreach_": "foreach"}
    return next((way for mark, way in ways.items() if any(f"::{mark}" in name for name in kernels)), "for-loop")

"""What an optimiser holds: its state for good, and the temporaries of its step."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from memopt.pricing.op_call import describe, tensors_in
from memopt.pricing.workspace_table import estimate_workspace
from memopt.torch_compat import FakeTensorMode, TorchDispatchMode, plain_tensors

# The numbers of a loop that a CPU kernel takes wrapped in tensors.
_SCALAR_BYTES = 64

OptimizerLike: TypeAlias = "type[Optimizer] | Optimizer | Callable[..., Optimizer] | str | None"


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
    """Find what an optimiser holds by running two of its steps on fake tensors: any optimiser written with torch ops.

    Args:
        optimizer: a class (its defaults), an instance (its own groups and options; it is left as it is), a
            `functools.partial` or another callable that takes the parameters, the name of a class of `torch.optim` in
            any case ("adamw"), or None for none.
        parameters: the model's parameters, real, fake or on "meta"; those with `requires_grad=False` count nothing.
            An instance's own parameters are used in their place.
        device_type: where the step will run, "cpu" or "cuda"; by default the device of the parameters (CPU for meta).
            It decides between the loop over parameters and foreach, where neither was asked for.

    Raises:
        ValueError: for an unknown name, an optimiser that needs a closure (LBFGS), or one that cannot be made from the
            parameters alone or whose step does not run on fake tensors.
    """
    if optimizer is None:
        return OptimizerAccount(0, 0, "none")
    given = list(_instance_parameters(optimizer) if isinstance(optimizer, Optimizer) else parameters)
    trained = [parameter for parameter in given if parameter.requires_grad]
    device_type = device_type or next((p.device.type for p in trained if p.device.type != "meta"), "cpu")
    with plain_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {id(parameter): _fake_with_gradient(parameter) for parameter in trained}
        count = _LiveBytes(device_type)
        with count:  # some make their state when they are made
            trial = _trial(optimizer, fakes)
        name = type(trial).__name__
        _refuse_closures(trial, name)
        if not trained:
            return OptimizerAccount(0, 0, name)
        how = _choose_implementation(trial, device_type)
        return OptimizerAccount(*_run_steps(trial, count, name), f"{name} ({how})")


def _instance_parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _fake_with_gradient(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same shape, strides and dtype on the fake CPU: fake CUDA needs a build with CUDA."""
    fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    standing_in = torch.nn.Parameter(fake)
    standing_in.grad = torch.empty_like(fake)
    return standing_in


def _trial(optimizer: OptimizerLike, fakes: dict[int, torch.nn.Parameter]) -> Optimizer:
    """An optimiser of the same kind, options and state over the stand-ins."""
    if isinstance(optimizer, Optimizer):
        return _same_on_fakes(optimizer, fakes)
    make: Any = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(make):
        raise ValueError(f"an optimizer is a class, an instance, a partial, a name or None, not {optimizer!r}")
    stand_ins: Sequence[torch.nn.Parameter] = list(fakes.values()) or [torch.nn.Parameter(torch.empty(1))]
    try:
        made = make(stand_ins)
    except Exception as error:
        raise ValueError(
            f"the optimizer {_title(make)} cannot be made from the parameters alone: {error}. "
            "Give its options by functools.partial, or give the instance"
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(f"the optimizer {_title(make)} gives a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def _same_on_fakes(optimizer: Optimizer, fakes: dict[int, torch.nn.Parameter]) -> Optimizer:
    same: Any = copy.copy(optimizer)  # of the attributes only: what is replaced below is the copy's own
    same.__dict__.pop("step", None)  # a scheduler's wrapper around the original's step
    for name in [name for name in same.__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs"))]:
        same.__dict__[name] = type(same.__dict__[name])()
    same.state = defaultdict(dict)
    for parameter, state in optimizer.state.items():
        if id(parameter) in fakes:
            same.state[fakes[id(parameter)]] = _without_storage(state)
    same.param_groups = [
        {**_without_storage(group), "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
        for group in optimizer.param_groups
    ]
    return same


def _without_storage(values: dict[str, Any]) -> dict[str, Any]:
    """State and options, their tensors (a learning rate may be one) as fake ones: no step writes to the original's."""

    def fake(value: Any) -> Any:
        return torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else copy.copy(value)

    return {key: fake(value) for key, value in values.items() if key != "params"}


def _class_named(name: str) -> Callable[..., Any]:
    found = {key.lower(): value for key, value in vars(torch.optim).items() if inspect.isclass(value)}
    classes = {key: value for key, value in found.items() if issubclass(value, Optimizer) and value is not Optimizer}
    if name.lower() not in classes:
        raise ValueError(f"torch.optim has no optimizer {name!r}; it has {', '.join(sorted(classes))}")
    return classes[name.lower()]


def _title(make: Any) -> str:
    return _title(make.func) if isinstance(make, functools.partial) else getattr(make, "__name__", repr(make))


def _refuse_closures(trial: Optimizer, name: str) -> None:
    closure = inspect.signature(type(trial).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{name} evaluates the model inside its step (a closure), which cannot be planned; use another"
        )


def _choose_implementation(trial: Optimizer, device_type: str) -> str:
    """Settle what torch would choose on the device, and say what it is. On the fake CPU it would choose the loop."""
    for group in trial.param_groups:
        undecided = group.get("foreach") is None and not group.get("fused") and not group.get("differentiable")
        if "foreach" in group and undecided:
            group["foreach"] = device_type == "cuda"
    first = trial.param_groups[0]
    return "fused" if first.get("fused") else "foreach" if first.get("foreach") else "for-loop"


def _run_steps(trial: Optimizer, count: _LiveBytes, name: str) -> tuple[int, int]:
    """State bytes, and the most temporary bytes of three steps.

    The first makes the state, the second has it all from its start, and the third takes itself for a late one, for
    those that begin differently (RAdam).
    """
    try:
        for count.number in (0.5, 0.5, 1000.0):
            with count:
                trial.step()
    except Exception as error:
        raise ValueError(
            f"a step of {name} cannot be tried on fake tensors: {error}. Plan with optimizer=None, and a budget less "
            "what it holds"
        ) from error
    return count.live, max(0, count.peak - count.live) + _SCALAR_BYTES


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, until they die, and the workspace of their kernels."""

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.number = 0.5
        """What `.item()` gives: a fake tensor has no value, and optimisers ask for the number of the step."""
        self._device_type = device_type
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.number if args[0].dtype.is_floating_point else args[0].dtype == torch.bool or 1
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage() for tensor in tensors_in((args, list((kwargs or {}).values())))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage() not in given:
                self._add(tensor.untyped_storage())
        if next(tensors_in(result), None) is not None:
            workspace = estimate_workspace(describe(func, args, kwargs or {}, result), self._device_type)
            self.peak = max(self.peak, self.live + workspace)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes

"""The state of a `TrainStep`: everything that a resumed run needs besides the model's own state; and `RunState`, the
whole state of a run for `torch.distributed.checkpoint`: each rank saves its part, for any number of ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import distributed

from memopt.compat.ddp import unwrapped
from memopt.compat.host import HOST
from memopt.device.devices import device_of
from memopt.optimizers.parameterwise import Parameterwise
from memopt.saved_values import generator_states, set_generators
from memopt.train.effective_batch import EffectiveBatch, groups_of
from passes.ops.fp8_formats import histories_state, load_histories

_HOST, _CARDS = "cpu", "cuda"
"""Keys in saved states: of the host's generator, and of the generators of cards of any kind."""


def random_state(devices: Iterable[torch.device]) -> dict[str, Any]:
    """The states of the random generators: Python's, numpy's, torch's on the host, and torch's on the given cards."""
    python, (kind, keys, *rest), host, _ = generator_states(HOST)
    states = {device: device_of(device).generator_state(device) for device in devices}
    return {
        "python": python,
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        _HOST: host.get_state(),
        _CARDS: {str(device): state for device, state in states.items() if state is not None},
    }


def set_random_state(state: dict[str, Any], devices: Iterable[torch.device]) -> None:
    """Set the generators back to what `random_state` returned, whose tensors may be on any device; those of cards that
    are not among `devices` stay as they are."""
    kind, keys, *rest = state["numpy"]
    numpy = (kind, keys.cpu().numpy().astype(np.uint32), *rest)
    host = torch.Generator().set_state(state[_HOST].cpu())
    set_generators((state["python"], numpy, host, None), HOST)
    for device in devices:
        if str(device) in state[_CARDS]:
            device_of(device).set_generator_state(device, state[_CARDS][str(device)].cpu())


StateDict = dict[str, Any]
KEYS = frozenset(
    {"number", "accumulate", "optimizers", "schedulers", "scaler", "effective_batch", "gradients", "generators"}
)
"""The keys that every state has. `"fp8_histories"` is missing in states of versions that did not save them."""


Step: TypeAlias = Any
"""A `TrainStep`, whose module imports this one."""


def state_of(step: Step) -> StateDict:
    """The state of a `TrainStep` as plain values and tensors, which are not copied, as in torch's own state dicts."""
    return {
        **_loop_state(step),
        "accumulate": step.accumulate,
        "optimizers": [optimizer.state_dict() for optimizer in step.optimizers],
        "effective_batch": asdict(step.effective_batch),
        "gradients": [parameter.grad if step.effective_batch.calls else None for parameter in step.parameters],
        "generators": random_state(_devices_of(step)),
    }


def _loop_state(step: Step) -> StateDict:
    """The part of a `TrainStep`'s state that is the same on all ranks and belongs to no parameter: the number of steps,
    and the states of schedulers, scaler and fp8 scales."""
    return {
        "number": step.number,
        "schedulers": [scheduler.state_dict() for scheduler in step.schedulers],
        "scaler": step.scaling.scaler.state_dict() if step.scaling.adapts else None,
        "fp8_histories": histories_state(unwrapped(step.model)),
    }


def _devices_of(step: Step) -> set[torch.device]:
    """The devices whose random generators a step on this rank may use."""
    return {parameter.device for parameter in step.parameters}


def restore(step: Step, state: StateDict) -> None:
    """Set `step` to `state`. Raises `ValueError` where the state is damaged, or was saved by a TrainStep with other
    arguments; `step` is then unchanged."""
    try:
        _check(step, state)
    except (TypeError, KeyError, AttributeError) as failure:
        raise ValueError(_DAMAGED.format(_said(failure))) from failure
    before, gradients = copy.copy(state_of(step)), [parameter.grad for parameter in step.parameters]
    before["fp8_histories"] = copy.deepcopy(before["fp8_histories"])
    try:
        _set(step, state)
    except Exception as failure:
        _set(step, before)
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient
        raise ValueError(_DAMAGED.format(_said(failure))) from failure


_DAMAGED = "this is no state of a TrainStep, or it is damaged ({}); load one that state_dict() returned"


def _said(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def _set_loop_state(step: Step, state: StateDict) -> None:
    """Set the loop's state to what `_loop_state` returned, which `_check_built_alike` has accepted."""
    load_histories(unwrapped(step.model), state.get("fp8_histories", {}))
    for scheduler, saved in zip(step.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    if step.scaling.adapts:
        step.scaling.scaler.load_state_dict(state["scaler"])
    step.number = state["number"]


def _set(step: Step, state: StateDict) -> None:
    for optimizer, saved in zip(step.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    empty = EffectiveBatch.empty(step.device)
    tensors = {
        name: value.to(step.device, empty.tokens.dtype)
        for name, value in state["effective_batch"].items()
        if isinstance(value, torch.Tensor)
    }
    step.effective_batch = EffectiveBatch(calls=state["effective_batch"]["calls"], **tensors)
    for parameter, gradient in zip(step.parameters, state["gradients"], strict=True):
        # A copy, since the next backward adds to it.
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    _set_loop_state(step, state)
    set_random_state(state["generators"], _devices_of(step))


def _check(step: Step, state: StateDict) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(_DAMAGED.format(f"it is a {type(state).__name__}"))
    missing = KEYS - state.keys()
    if missing:
        raise ValueError(_DAMAGED.format(f"it has no {', '.join(sorted(missing))}"))
    _check_built_alike(step, state, ("optimizers", "schedulers"))
    if state["effective_batch"]["calls"] and state["accumulate"] != step.accumulate:
        raise ValueError(
            f"the state is from within an effective batch of {state['accumulate']} calls, this TrainStep has "
            f"accumulate={step.accumulate}; build it with accumulate={state['accumulate']}, or save after its last call"
        )
    shapes = [None if gradient is None else gradient.shape for gradient in state["gradients"]]
    own_shapes = [parameter.shape for parameter in step.parameters]
    if len(shapes) != len(own_shapes) or any(a not in (None, b) for a, b in zip(shapes, own_shapes, strict=True)):
        raise ValueError(
            "the gradients of the state are of other parameters than this TrainStep's; build it from the model and "
            "optimizers of the one that was saved"
        )


def _check_built_alike(step: Step, state: StateDict, lists: Sequence[str]) -> None:
    """Raise `ValueError` for a state of a TrainStep with other numbers of the `lists` ("optimizers", "schedulers"), or
    if only one of both has a scaler."""
    for name in lists:
        own = getattr(step, name)
        if len(state[name]) != len(own):
            there = len(state[name])
            raise ValueError(f"the state has {there} {name}, this TrainStep {len(own)}; build it with as many")
    if (state["scaler"] is not None) != step.scaling.adapts:
        had, has = ("with", "without") if state["scaler"] is not None else ("without", "with")
        raise ValueError(f"the state is of a run {had} a GradScaler, this TrainStep is {has} one; build it {had} one")


MODEL, OPTIMIZERS, LOOP = "model", "optimizers", "loop"


class RunState:
    """The state of a `TrainStep` with its model and optimizers, for `torch.distributed.checkpoint`.

    `dcp.save({"run": RunState(step)}, checkpoint_id=folder)` and `dcp.load({"run": RunState(step)},
    checkpoint_id=folder)`, called on all ranks, save and restore a run under FSDP2, `DistributedDataParallel` or on one
    device. It may be resumed on another number of ranks, or with another wrapper: parameters and the optimizers' state
    are stored by the names of parameters. On the same number of ranks each rank's random generators are restored too,
    and the run is bitwise as if it had never stopped; on another number each rank keeps its current generators.

    Raises `ValueError` if it is saved or loaded within an effective batch, for a state of another run, and for
    optimizers that levers have wrapped."""

    def __init__(self, step: Step) -> None:
        if changed := next((one for one in step.optimizers if isinstance(one, Parameterwise)), None):
            raise ValueError(
                f"the state of {type(changed).__name__} cannot be divided among ranks; save step.state_dict() and the "
                "model's on each rank with torch.save, or leave the levers on the optimizer out"
            )
        self.step = step

    def state_dict(self) -> StateDict:
        """The state to save or to load into: model and optimizers, sharded as on the ranks, and the loop's."""
        from torch.distributed.checkpoint.state_dict import get_state_dict  # it takes a second to import

        if calls := self.step.effective_batch.calls:
            raise ValueError(
                f"the run is within an effective batch, after {calls} of {self.step.accumulate} calls: save and load "
                "after a call whose result is complete"
            )
        self.step.settle()
        model, optimizers = get_state_dict(unwrapped(self.step.model), list(self.step.optimizers))
        file = io.BytesIO()  # one value, so that the names do not depend on the number of ranks
        torch.save({**_loop_state(self.step), "generators": self._generators()}, file)
        return {MODEL: model, OPTIMIZERS: optimizers, LOOP: file.getvalue()}

    def load_state_dict(self, state: StateDict) -> None:
        """Set model, optimizers and loop to a state that `torch.distributed.checkpoint` has loaded."""
        from torch.distributed.checkpoint.state_dict import set_state_dict  # it takes a second to import

        saved = state[LOOP]
        if not isinstance(saved, bytes):
            raise ValueError(
                f"the checkpoint has a {type(saved).__name__} in place of the state of a TrainStep; load one that was "
                "saved with RunState"
            )
        loop = torch.load(io.BytesIO(saved), weights_only=True)
        generators = loop.pop("generators")
        _check_built_alike(self.step, loop, ("schedulers",))
        set_state_dict(
            unwrapped(self.step.model),
            list(self.step.optimizers),
            model_state_dict=state[MODEL],
            optim_state_dict=state[OPTIMIZERS],
        )
        self.step.follow_up.forget()
        rank, ranks = self._place()
        _set_loop_state(self.step, loop)
        if len(generators) == ranks:
            set_random_state(generators[rank], _devices_of(self.step))

    def _generators(self) -> list[Any]:
        """The states of the random generators of all ranks."""
        found: list[Any] = [random_state(_devices_of(self.step))]
        for group in groups_of(self.step.model):
            gathered: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(gathered, found, group=group)
            found = [one for of_rank in gathered for one in of_rank]
        return found

    def _place(self) -> tuple[int, int]:
        """The position of this rank's generators in `_generators`, and the number of ranks."""
        position, ranks = 0, 1
        for group in groups_of(self.step.model):
            size = distributed.get_world_size(group)
            position += ranks * distributed.get_rank(group)
            ranks *= size
        return position, ranks

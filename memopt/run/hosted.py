"""Frozen parameters that are stored in the host's memory, also during a step: the plan copies each to the device when
it is read.

Between calls, such a parameter is a tensor on the host with its values: code that reads, saves or loads the model works
with that. While the model is called, the parameter is a tensor on its device without memory, as when it was captured,
and the step's graph is given the host tensor instead.

A model that was built on the host and is called with inputs on a card moves there one tensor at a time, except for its
frozen parameters: until they are planned, all of them are stored on the host (`move_to`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from memopt.capture.inputs import Call, batch_call, replaced_tensors, tensors_in
from memopt.compat.ddp import unwrapped
from memopt.compat.host import HOST
from memopt.compat.modules import apply_to_each, moves_as_modules_do
from memopt.compat.operators import RunningBy, schema_of, tree_map
from memopt.compat.tensors import is_sharded
from memopt.levers.all import OFFLOAD_PARAMETERS
from memopt.planning.options import Options
from memopt.planning.plan import Plan
from passes.ops.offload_ops import bring, lend


@dataclass(eq=False)
class _Home:
    """A parameter whose values are in the host's memory."""

    host: Tensor
    """Its values on the host, in the layout that it has on the device."""
    shell: Tensor
    """A tensor on its device with the same layout, whose storage has 0 bytes."""

    @classmethod
    def of(cls, parameter: nn.Parameter, device: torch.device) -> _Home:
        """Move a parameter to host memory, from which its values can be copied to `device`."""
        host = lend(parameter.data, device)
        parameter.data = host  # frees the device's memory, which the shell briefly takes again
        shell = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=device)
        shell.untyped_storage().resize_(0)
        _homes[parameter] = home = cls(host, shell)
        return home

    def bring_back(self, parameter: nn.Parameter) -> None:
        """Move a parameter to its device again."""
        parameter.data = torch.empty_strided(
            self.host.shape, self.host.stride(), dtype=self.host.dtype, device=self.shell.device
        ).copy_(self.host)
        del _homes[parameter]


_homes: Any = WeakTensorKeyDictionary()
"""The `_Home` of each parameter of this process that is stored on the host."""
_built_on_host: Any = WeakIdKeyDictionary()
"""The models that `move_to` has moved to a device."""
_called: list[nn.Module] = []
"""The models that are being called, outermost first."""


def _lying(model: nn.Module) -> list[tuple[nn.Parameter, _Home]]:
    """The parameters of a model that are stored on the host. A parameter whose memory was replaced since is dropped
    from `_homes`."""
    found = []
    for parameter in model.parameters() if _homes else ():
        home = _homes.get(parameter)
        if home is None:
            continue
        if parameter.data_ptr() in (home.host.data_ptr(), 0):
            found.append((parameter, home))
        else:
            del _homes[parameter]
    return found


@contextmanager
def on_device(model: nn.Module) -> Iterator[None]:
    """A context in which parameters of a model that are stored on the host look like tensors on their device, but have
    no memory there."""
    if model in _called:
        yield
        return
    for parameter, home in _lying(model) if _homes else ():
        parameter.data = home.shell
    _called.append(model)
    try:
        yield
    finally:
        _called.remove(model)
        for parameter, home in _lying(model) if _homes else ():
            parameter.data = home.host


def home_device(model: nn.Module) -> torch.device:
    """The device on which a model's operators run, also while its first parameter is stored on the host."""
    parameter = next(model.parameters())
    home = _homes.get(parameter) if _homes else None
    return parameter.device if home is None else home.shell.device


def device_to_move_to(model: nn.Module, options: Options, call: Call) -> torch.device | None:
    """The device of a call's inputs, if the model has to move to it: if all of the model is on the host, the inputs are
    not, and `allow` lets frozen parameters stay on the host ("offload_parameters"). Else None; also for a model that is
    spread over ranks, since FSDP2 has a way of its own to keep parameters on the host."""
    if OFFLOAD_PARAMETERS not in options.levers:
        return None
    for parameter in model.parameters():
        if parameter.device.type != HOST.type or is_sharded(parameter) or parameter in _homes:
            return None
    return next((one.device for one in tensors_in(call) if one.device.type not in (HOST.type, "meta")), None)


@contextmanager
def moved_to_inputs(model: nn.Module, options: Options, example_inputs: Any) -> Iterator[None]:
    """A context in which a model that was built on the host is on the device of the example inputs, if it has to move
    there (`device_to_move_to`). The model moves back if the context's code fails."""
    model, call = unwrapped(model), ((), {}) if example_inputs is None else batch_call(example_inputs, options.loss_fn)
    device = device_to_move_to(model, options, call)
    try:
        if device is not None:
            move_to(model, device)
        yield
    except BaseException:
        if device is not None:
            move_back(model)
        raise


def move_to(model: nn.Module, device: torch.device) -> None:
    """Move a model that was built on the host to a device, as `model.to` does, but leave its frozen parameters on the
    host. Some frozen parameters move to the device, too: those of modules that move in a way of their own, such as
    quantised layers, and those that share memory with others."""
    stay: dict[int, nn.Parameter] = {}
    _built_on_host[model] = True
    for module in model.modules():
        if moves_as_modules_do(module):
            own = [one for one in module._parameters.values() if type(one) is nn.Parameter]
            stay |= {id(one): one for one in own if not one.requires_grad and one.numel() > 0}
    addresses = Counter(one.untyped_storage().data_ptr() for one in model.parameters())
    stay = {key: one for key, one in stay.items() if addresses[one.untyped_storage().data_ptr()] == 1}
    apply_to_each(model, lambda tensor: tensor if id(tensor) in stay else tensor.to(device))
    for parameter in stay.values():
        _Home.of(parameter, device)


def move_back(model: nn.Module) -> None:
    """Undo `move_to`: move the model to the host, where it was built. Of a model that was built on a device, move the
    parameters that a plan has put on the host back to that device."""
    if _built_on_host.pop(model, False):
        for parameter, _ in _lying(model):
            del _homes[parameter]
        apply_to_each(model, lambda tensor: tensor.to(HOST))
    else:
        bring_back(model)


def with_inputs_there(model: nn.Module, call: Call) -> Call:
    """The call with its tensors moved to the model's device, if the model has parameters that are stored on the host:
    the caller, such as `generate`, may have put them on the host because such a model seems to be there."""
    if not _homes or not (there := _lying(model)):
        return call
    device = there[0][1].shell.device
    if all(tensor.device == device or tensor.dim() == 0 for tensor in tensors_in(call)):
        return call
    return replaced_tensors(call, lambda tensor: tensor.to(device) if tensor.dim() > 0 else tensor)


def bring_back(model: nn.Module) -> None:
    """Move all parameters of a model that are stored on the host back to their device."""
    for parameter, home in _lying(model):
        home.bring_back(parameter)


def place(model: nn.Module, plan: Plan) -> None:
    """Move the parameters that the plan has on the host there, and all others to the device. If it has any on the host,
    the plan must have its graphs (`plan.captured`), unlike one that was loaded from a file."""
    numbers = plan.regions[0].hosted
    captured = plan.captured if numbers else None
    parameters = {captured.regions[0].frozen_ids[number] for number in numbers} if captured else ()
    there = {id(parameter): home for parameter, home in _lying(model)}
    for parameter in model.parameters():
        if id(parameter) in parameters and id(parameter) not in there:
            _Home.of(parameter, parameter.device)
        elif id(parameter) in there and id(parameter) not in parameters:
            there[id(parameter)].bring_back(parameter)


def placed(inputs: Sequence[Any], hosted: Collection[int]) -> tuple[Any, ...]:
    """The inputs of a region with host tensors in place of the parameters numbered in `hosted`. These are moved to the
    host if necessary, and all other parameters among the inputs to the device."""
    if not hosted and not _homes:
        return tuple(inputs)
    found = []
    for number, value in enumerate(inputs):
        home = _homes.get(value) if isinstance(value, nn.Parameter) else None
        if number in hosted:
            if home is None:
                home = _Home.of(value, value.device)
                value.data = home.shell
            value = home.host
        elif home is not None:
            home.bring_back(value)
        found.append(value)
    return tuple(found)


def _run_on_copies(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of an operator, without gradients, that gets a temporary copy on the device of each parameter that is
    stored on the host. Raises `RuntimeError` for an operator that may write to such a parameter."""

    def there(value: Any) -> Any:
        home = _homes.get(value) if isinstance(value, nn.Parameter) else None
        if home is None:
            return value
        if schema_of(func).is_mutable:
            raise RuntimeError(
                f"{func} may write to a parameter that is stored in the host's memory (offload_parameters); call "
                "memopt.remove(model) first"
            )
        return bring(home.host, home.shell.device)

    args, kwargs = tree_map(there, (args, kwargs))
    return func(*args, **kwargs)


@contextmanager
def plainly(model: nn.Module, *, compiled: bool) -> Iterator[None]:
    """A context in which the plain model can be called although parameters are stored on the host. Without gradients,
    each operator gets temporary copies of them on the device. With gradients, or if the model's own call is `compiled`,
    they are moved to the device for good."""
    if torch.is_grad_enabled() or compiled:
        bring_back(model)
    if not _lying(model):
        yield
        return
    with on_device(model), RunningBy(_run_on_copies):
        yield

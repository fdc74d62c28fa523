"""Copies of optimizers with all of their attributes, whose parameters are stand-ins without memory."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.optim import Optimizer

from memopt.compat.host import is_on_host
from memopt.compat.modules import wrapped_by_scheduler
from memopt.compat.operators import plain_tensors
from memopt.compat.tensors import shard_of, with_memory

Fakes: TypeAlias = dict[int, torch.nn.Parameter]
"""Stand-ins by the `id` of the parameter that they stand for, each with a gradient where that one gets one."""

T = TypeVar("T")
_HEAP_TYPE = 1 << 9
"""The flag of classes that are written in Python."""
_MOST = 100_000
"""The most objects that are copied; further ones are shared."""
_EMPTY: dict[str, Callable[[], Any]] = {"param_groups": list, "state": partial(defaultdict, dict)}
_LEFT_OUT = ("asyncio", "concurrent", "logging", "multiprocessing", "threading")
"""Modules whose objects are shared, not copied."""
_CODE = (types.FunctionType, types.MethodType, partial)
_WHOLE = (type, Enum, types.ModuleType, torch.dtype, torch.device, torch.Size, str, bytes, int, float, complex, bool)


def bare_copy(value: T) -> T:
    """A shallow copy of all attributes, unlike the class's own, as `Optimizer` copies three only."""
    same = object.__new__(type(value))
    for name, held in attributes_of(value):
        object.__setattr__(same, name, held)
    return same


def attributes_of(value: object) -> Iterator[tuple[str, Any]]:
    """The names and values of an object's own attributes, also of those in `__slots__`."""
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{slot}" if slot[:2] == "__" and slot[-2:] != "__" else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


class OptimizerCopy:
    """Copies an optimizer instance with its options, its state and everything else that it holds, so that steps of the
    copy change nothing outside of it.

    Tensors become fake tensors on `device`; one-element tensors in the host's memory, such as step numbers and some
    learning rates, become real copies, since their values decide what a step does. The parameter groups of the copy
    contain the stand-ins of parameters; parameters without one are left out. Functions are copied where they refer to
    the optimizer or its tensors. Hooks and the wrapper that a scheduler puts around `step` are left out."""

    def __init__(self, fakes: Fakes, device: torch.device) -> None:
        self.fakes, self.device = fakes, device
        self.made: list[torch.Tensor] = []
        """The copies of the tensors that `held_tensors` finds."""
        self.copied: list[Optimizer] = []
        """The optimizer that was copied, and those that it holds."""
        self._copies: dict[int, Any] = dict(fakes)
        self._seen: list[object] = []
        """What was copied, which must not die while its `id` is known."""
        self._home, self._addresses = device.type, set[int]()

    def of(self, optimizer: Optimizer) -> Optimizer:
        """Copy an optimizer, or one that it holds inside, and return the copy. Adds to `copied` and `made`."""
        same = self._note(optimizer, object.__new__(type(optimizer)))
        self.copied.append(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._home = parameters[0].device.type if parameters else self._home
        self._addresses |= {one.untyped_storage().data_ptr() for one in with_memory(parameters)}
        own: dict[str, Any] = dict(attributes_of(optimizer))
        if (inner := wrapped_by_scheduler(own.get("step"))) is not None:
            own["step"] = types.MethodType(inner, optimizer)
        if "state" in own:
            own["state"] = self._state(own["state"])
        if "param_groups" in own:
            own["param_groups"] = self._groups(own["param_groups"])
        for name, value in own.items():
            hooks = name.endswith(("_hooks", "_hooks_with_kwargs")) and isinstance(value, dict)
            object.__setattr__(same, name, type(value)() if hooks else self(value))
        return same

    def __call__(self, value: Any) -> Any:
        """The copy of any value; the value itself where it cannot change, or its kind is not known."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if value is None or isinstance(value, _WHOLE):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Optimizer):
            return self.of(value)
        if isinstance(value, _CODE):
            return self._function(value)
        if isinstance(value, (tuple, frozenset)):
            return self._fixed(value)
        if type(value).__flags__ & _HEAP_TYPE or isinstance(value, (dict, list, set)):
            return self._container(value)
        return self._note(value, type(value)(map(self, value), value.maxlen)) if isinstance(value, deque) else value

    def _note(self, value: Any, same: Any) -> Any:
        self._copies[id(value)] = same
        self._copies[id(same)] = same  # a copy is not copied again
        self._seen += [value, same]
        return same

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if is_on_host(value) and value.numel() == 1 and not isinstance(value, torch.nn.Parameter):
            with plain_tensors():
                same = shard_of(value.detach()).clone()
        else:
            shard = shard_of(value.detach())
            same = torch.empty_like(shard, device=self.device if shard.device.type == self._home else shard.device)
        if isinstance(value, torch.nn.Parameter):
            return self._note(value, torch.nn.Parameter(same, value.requires_grad))
        own = shard_of(value)
        if own.layout != torch.strided or own.untyped_storage().data_ptr() not in self._addresses:
            self.made.append(same)
        return self._note(value, same)

    def _state(self, state: Mapping[Any, Any]) -> Any:
        """The copy of the state: entries whose key is no tensor, and those of parameters that have a stand-in and lie
        on a device of the copy's type. For parameters on another type of device a step of the copy makes new state."""
        if id(state) in self._copies:  # a wrapper shares it
            return self._copies[id(state)]
        same = self._note(state, defaultdict(dict))
        for key, held in state.items():
            if not isinstance(key, torch.Tensor) or (id(key) in self.fakes and key.device.type == self.device.type):
                same[self._key(key)] = self(held)
        return same

    def _groups(self, groups: list[dict[str, Any]]) -> Any:
        if id(groups) in self._copies:
            return self._copies[id(groups)]
        same = self._note(groups, [])
        for group in groups:
            if id(group) not in self._copies:
                own = {name: self(value) for name, value in group.items() if name != "params"}
                self._note(group, own)["params"] = [self.fakes[id(p)] for p in group["params"] if id(p) in self.fakes]
            same.append(self._copies[id(group)])
        return same

    def _key(self, key: Any) -> Any:
        """The copy of a dictionary's key; for the `id` of a parameter, the `id` of its stand-in."""
        return id(self.fakes[key]) if type(key) is int and key in self.fakes else self(key)

    def _fixed(self, value: Any) -> Any:
        held = [self(one) for one in value]
        if all(one is same for one, same in zip(value, held, strict=True)):
            return value
        return self._note(value, (tuple if isinstance(value, tuple) else frozenset).__new__(type(value), held))

    def _container(self, value: Any) -> Any:
        """The copy of a dictionary, list or set, or of any object whose class is written in Python."""
        kind: Any = next(
            (kind for kind in (OrderedDict, defaultdict, dict, list, set) if isinstance(value, kind)), object
        )
        if len(self._copies) > _MOST or type(value).__module__.partition(".")[0] in _LEFT_OUT:
            return value
        try:
            same = kind.__new__(type(value))
        except TypeError:  # of a class in C
            return value
        if isinstance(value, defaultdict):
            same.default_factory = value.default_factory
        self._note(value, same)
        if isinstance(value, dict):
            for key, held in list(value.items()):
                kind.__setitem__(same, self._key(key), self(held))
        elif isinstance(value, list):
            list.extend(same, map(self, value))
        elif isinstance(value, set):
            set.update(same, map(self, value))
        with nullcontext() if kind is not object or _is_record(value) else self._uncounted():
            for name, held in list(attributes_of(value)):
                object.__setattr__(same, name, self(held))
        return same

    def _function(self, value: Any) -> Any:
        """The copy of a method (bound to the copy of its object), of a `partial`, or of a function (with copies of what
        it closes over). A function that closes over nothing of the kinds that are copied is returned itself."""
        if isinstance(value, types.MethodType):
            return types.MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, partial):
            return partial(self(value.func), *map(self, value.args), **self(value.keywords))
        closure = value.__closure__ or ()
        held = [cell.cell_contents for cell in closure if _is_full(cell)]
        if not any(isinstance(one, (torch.Tensor, Optimizer, dict, list, *_CODE)) for one in held):
            return value
        cells = tuple(types.CellType() for _ in closure)
        same = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        same.__kwdefaults__ = value.__kwdefaults__
        self._note(value, same)
        with self._uncounted():
            for cell, own in zip(closure, cells, strict=True):
                if _is_full(cell):
                    own.cell_contents = self(cell.cell_contents)
        return same

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """A context in which the originals hold nothing, so that a copy that refers to one steps nothing."""
        own = [(vars(one), {name: vars(one)[name] for name in _EMPTY if name in vars(one)}) for one in self.copied]
        for attributes, held in own:
            attributes.update({name: empty() for name, empty in _EMPTY.items() if name in held})
        try:
            yield
        finally:
            for attributes, held in own:
                attributes.update(held)

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """A context in which copied tensors are not among `made`."""
        number = len(self.made)
        yield
        del self.made[number:]


def _is_record(value: object) -> bool:
    return hasattr(value, "__dataclass_fields__") or isinstance(value, types.SimpleNamespace)


def _is_full(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def held_tensors(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """The tensors that an optimizer holds at any depth of containers and simple objects, but its parameters."""
    seen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left: list[Any] = [value for _, value in attributes_of(optimizer)]
    while left:
        value = left.pop()
        if id(value) in seen or value is None or isinstance(value, _WHOLE):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                yield value
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple, set)):
            left += value
        elif _is_record(value):
            left += [held for _, held in attributes_of(value)]

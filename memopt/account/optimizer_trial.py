"""Optimizers over fake parameters, whose steps can be tried: of an instance a copy with all of its attributes, whose
parameters are stand-ins without memory. And facts about optimizers that exist already."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch.optim import Optimizer

from memopt.account.eager_bytes import EagerBytes
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import HOST, is_on_host
from memopt.compat.modules import eager_optimizers, wrapped_by_scheduler
from memopt.compat.operators import plain_tensors, tree_leaves, tree_map
from memopt.compat.tensors import shard_of, with_memory

OptimizerLike: TypeAlias = "type[Optimizer] | Optimizer | Callable[..., Optimizer] | str | None"

Layout: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a parameter."""


Fakes: TypeAlias = dict[int, torch.nn.Parameter]
"""Stand-ins by the `id` of the parameter that they stand for, each with a gradient where that one gets one."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class GivenOptimizer:
    """The optimizer that the user gave, which is kept alive only where another one like it cannot be made: a loop may
    replace its optimizer, as when layers are unfrozen, and the state of the first one is then to be freed."""

    kept: OptimizerLike
    """The optimizer as given; for an instance of one of torch's classes, a function that makes another like it."""
    instance: weakref.ref[Optimizer] | None = None
    """A weak reference to an instance of one of torch's own classes; None for everything else."""

    @classmethod
    def of(cls, optimizer: OptimizerLike) -> GivenOptimizer:
        """The optimizer, held weakly where it is an instance of one of torch's own classes."""
        if not isinstance(optimizer, Optimizer) or type(optimizer) not in vars(torch.optim).values():
            return cls(optimizer)
        kind: Any = type(optimizer)
        takes = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in takes}
        return cls(partial(kind, **options), weakref.ref(optimizer))

    @property
    def now(self) -> OptimizerLike:
        """The optimizer as it was given, or once that instance is freed a function that makes another like it."""
        alive = self.instance() if self.instance is not None else None
        return self.kept if alive is None else alive

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenOptimizer) and self.now == other.now

    def __hash__(self) -> int:
        return hash(self.now)


@contextmanager
def optimizer_on_fakes(
    optimizer: OptimizerLike,
    parameters: Iterable[torch.Tensor],
    count: EagerBytes,
    home: str,
    *,
    foreach: bool,
    idle: Iterable[torch.Tensor] = (),
) -> Iterator[Optimizer]:
    """A context that yields the optimizer with fake tensors on the device `home` in place of `parameters`, so that its
    steps can be tried. With "meta" as `home` they are plain tensors on "meta".

    `count` counts the state that an instance has already, or what making the optimizer allocates. `foreach`: by default
    torch steps all parameters at once on the device that is planned for, and so it does here. `idle` are parameters of
    an instance that have no gradient when it steps. Functions of the optimizer that `torch.compile` has wrapped run
    uncompiled. Raises `ValueError` as `trial` does."""
    mode = nullcontext() if home == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with plain_tensors(), mode, eager_optimizers(foreach=foreach):
        device = torch.device(home)
        fakes = {id(parameter): _fake(parameter, device, gradient=False) for parameter in idle}
        fakes |= {id(parameter): _fake(parameter, device) for parameter in parameters}
        if isinstance(optimizer, Optimizer):
            copies = _OptimizerCopy(fakes, device)
            on_fakes = copies.of(optimizer)
            count.count(copies.made)
            with copies.put_aside():
                yield on_fakes
        else:
            with count:
                on_fakes = trial(optimizer, fakes, device)
            yield on_fakes


def trial(optimizer: OptimizerLike, fakes: Fakes, device: torch.device) -> Optimizer:
    """The optimizer that `optimizer` (class, instance, function or name) makes with the stand-ins `fakes` as its
    parameters; of an instance a copy, with its state on `device`. Raises `ValueError` where `optimizer` makes no
    optimizer, or cannot be made from the parameters alone."""
    if isinstance(optimizer, Optimizer):
        return _OptimizerCopy(fakes, device).of(optimizer)
    make: Any = _class_named(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(make):
        several = isinstance(optimizer, (list, tuple))
        mend = "; combine several into one Optimizer with the parameter groups and state of all" if several else ""
        got = f"a {type(optimizer).__name__}" if several else repr(optimizer)
        raise ValueError(f"optimizer must be a class, an instance, a partial, a name or None, not {got}{mend}")
    stand_ins: Sequence[torch.nn.Parameter] = list(fakes.values()) or [torch.nn.Parameter(torch.empty(1))]
    try:
        made = make(stand_ins)
    except Exception as error:
        raise ValueError(
            f"the optimizer {_title(make)} cannot be made from the parameters alone: {error}. "
            "Give its options by functools.partial, or give the instance"
        ) from error
    if not isinstance(made, Optimizer):
        raise ValueError(f"the optimizer {_title(make)} returns a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def fused(optimizer: OptimizerLike) -> OptimizerLike:
    """The same optimizer with torch's fused kernels, which need no temporaries: of an instance a shallow copy, of all
    else a function that takes the parameters.

    None where the optimizer uses fused kernels already, has no such option, or is None. Raises as `trial` does."""
    if optimizer is None:
        return None
    groups = (optimizer if isinstance(optimizer, Optimizer) else trial(optimizer, {}, HOST)).param_groups
    if any(group.get("fused", True) for group in groups):
        return None
    if isinstance(optimizer, Optimizer):
        return _by_fused_kernels(bare_copy(optimizer))
    return lambda parameters: _by_fused_kernels(trial(optimizer, dict(enumerate(parameters)), HOST))


def _by_fused_kernels(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return optimizer


def parameters_of(*optimizers: Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order of the optimizers and their groups, groups added later included."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def on_meta(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on "meta" with these sizes, strides and dtype that requires a gradient, in place of a parameter."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").requires_grad_()


def _fake(parameter: torch.Tensor, device: torch.device, *, gradient: bool = True) -> torch.nn.Parameter:
    """A parameter of the same shape, strides and dtype, with `gradient` if set; of a sharded one this rank's part."""
    shard = shard_of(parameter)
    fake = torch.empty_strided(shard.shape, shard.stride(), dtype=shard.dtype, device=device)
    standing_in = torch.nn.Parameter(fake)
    standing_in.grad = torch.empty_like(fake) if gradient else None
    return standing_in


def step(on_fakes: Any) -> None:
    """Step an optimizer of fake parameters; a closure that it needs returns 0 and sets the gradients again."""
    gradients = [(parameter, parameter.grad) for parameter in parameters_of(on_fakes)]

    def closure() -> torch.Tensor:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        return torch.zeros(())

    try:
        on_fakes.step(*[closure] * _needs_closure(on_fakes))
    except (AssertionError, TypeError, ValueError, RuntimeError):
        if _needs_closure(on_fakes) or "closure" not in inspect.signature(on_fakes.step).parameters:
            raise
        closure()
        on_fakes.step(closure)


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _class_named(name: str) -> Callable[..., Any]:
    found = {key.lower(): value for key, value in vars(torch.optim).items() if inspect.isclass(value)}
    classes = {key: value for key, value in found.items() if issubclass(value, Optimizer) and value is not Optimizer}
    if name.lower() not in classes:
        raise ValueError(f"torch.optim has no optimizer {name!r}; it has {', '.join(sorted(classes))}")
    return classes[name.lower()]


def _title(make: Any) -> str:
    return _title(make.func) if isinstance(make, functools.partial) else getattr(make, "__name__", repr(make))


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The tensors in the optimizer's state, at any depth."""
    return (leaf for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, torch.Tensor))


@contextmanager
def optimizer_restored(optimizer: Optimizer) -> Iterator[None]:
    """A context that at its end gives the parameters, the state and the options of an optimizer the values that they
    had at its start, in the same tensor objects. A copy of these values takes host memory meanwhile."""
    written = {id(tensor): tensor for tensor in [*parameters_of(optimizer), *state_tensors(optimizer)]}
    values = [(tensor, tensor.detach().to(HOST, copy=True)) for tensor in written.values()]
    same = partial(tree_map, lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf))
    state = {key: same(value) for key, value in optimizer.state.items()}
    groups = [dict(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(options)


@dataclass(frozen=True)
class LiveOptimizer:
    """The facts about an existing optimizer on which its bytes depend: class, order of the parameters, kernels."""

    kind: type[Optimizer]
    order: tuple[int, ...]
    """The `id`s of its parameters, in order: a loop frees the temporaries of one in the step of the next."""
    fused: bool
    """Whether all its groups are stepped by torch's fused kernels, which need no temporaries."""
    instance: weakref.ref[Optimizer] = field(compare=False, repr=False)

    @classmethod
    def of(cls, optimizer: Optimizer) -> LiveOptimizer:
        """The description of an optimizer, which keeps neither the optimizer nor its parameters alive."""
        order = tuple(map(id, parameters_of(optimizer)))
        fused = all(group.get("fused") is True for group in optimizer.param_groups)
        return cls(type(optimizer), order, fused, weakref.ref(optimizer))

    def like(self, optimizer: OptimizerLike) -> OptimizerLike:
        """`optimizer`, this one's class or name, or a function that makes it with fused kernels as this one has."""
        if not self.fused:
            return optimizer
        make: Any = self.kind
        return partial(make, fused=True)

    def in_order(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters in the order in which this optimizer steps them; those that it does not step come last."""
        places = {parameter: place for place, parameter in enumerate(self.order)}
        return sorted(parameters, key=lambda parameter: places.get(id(parameter), len(places)))

    def departure(self, parameters: Iterable[torch.Tensor]) -> str:
        """A text on how this optimizer differs from one of its class with default options that steps `parameters` in
        their order: by fused kernels, or by another order. Equal in all processes; empty where nothing differs."""
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        order = [numbers[parameter] for parameter in self.order if parameter in numbers]
        return f"{'fused ' if self.fused else ''}{order if order != sorted(order) else ''}"


def steps_any(optimizer: Optimizer, ids: set[int]) -> bool:
    """Whether an optimizer steps any of the parameters with these `id`s."""
    groups = getattr(optimizer, "param_groups", ())
    return any(id(parameter) in ids for group in groups for parameter in group["params"])


def live_optimizer_of(optimizer: Any, live: Sequence[LiveOptimizer]) -> LiveOptimizer | None:
    """The only one in `live` whose class is `optimizer`, a class or its name; else None."""
    name = optimizer.lower() if isinstance(optimizer, str) else None
    found = [one for one in live if one.kind is optimizer or one.kind.__name__.lower() == name]
    return found[0] if len(found) == 1 else None


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


class _OptimizerCopy:
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
        """Values and copies that must live while their `id` is known."""
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

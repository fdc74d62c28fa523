"""Optimizers over fake parameters, whose steps can be tried; and facts about optimizers that exist already."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from memopt.account.eager_bytes import EagerBytes
from memopt.account.optimizer_copy import Fakes, OptimizerCopy, bare_copy
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import HOST
from memopt.compat.modules import eager_optimizers
from memopt.compat.operators import plain_tensors, tree_leaves, tree_map
from memopt.compat.tensors import shard_of

OptimizerLike: TypeAlias = "type[Optimizer] | Optimizer | Callable[..., Optimizer] | str | None"

Layout: TypeAlias = tuple[Sequence[int], Sequence[int], torch.dtype]
"""Shape, strides and dtype of a parameter."""


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
            copies = OptimizerCopy(fakes, device)
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
        return OptimizerCopy(fakes, device).of(optimizer)
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

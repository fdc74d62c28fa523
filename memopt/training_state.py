"""The state that a forward and backward change, saved so that a second run can start from the same state."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from typing_extensions import Self

from memopt.compat.host import HOST
from memopt.compat.modules import buffers_in, cached_parametrizations, modules_of
from memopt.saved_values import (
    GENERATORS,
    SavedValues,
    apart,
    generator_states,
    has_version,
    is_small,
    on_host,
    parameters_restored,
    parts_of,
    set_aside,
    set_generators,
    set_state,
    state_of,
    written_parameters,
)
from passes.ops.fp8_formats import histories_state, load_histories

Tensors = dict[str, torch.Tensor]


def _device_of(model: nn.Module) -> torch.device:
    """The device that a model is trained on. Frozen parameters may lie on the host; those that are trained do not."""
    parameters = list(model.parameters())
    return next(filter(attrgetter("requires_grad"), parameters), parameters[0]).device


class Attributes:
    """The attributes of all modules of a model, so that they can be restored. Included are the elements of the modules'
    dicts, lists, queues and sets (parameters, buffers and hooks among them), and the states of random generators, also
    of those outside of the model to which the code of a module's forward refers.

    Values that are written in place are not restored; for what `tensors` yields, `values_restored` does that."""

    def __init__(self, model: nn.Module) -> None:
        tables = list({id(vars(one)): vars(one) for one in model.modules()}.values())
        values = {id(value): value for table in tables for value in table.values()}
        held = [value for value in values.values() if type(value) in _CONTAINERS]
        forwards = {type(one).forward for one in model.modules()}
        values |= {id(value): value for forward in forwards for value in _named_in(forward)}
        self._own = {id(table[name]) for table in tables for name in ("_parameters", "_buffers") if name in table}
        self._contents: Contents = [(one, one.copy()) for one in (*tables, *held, cached_parametrizations())]
        self._generators: Contents = [(one, state_of(one)) for one in values.values() if isinstance(one, GENERATORS)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors among the attributes and their elements, without parameters, buffers and subclasses."""
        for values in (values for container, values in self._contents if id(container) not in self._own):
            for value in values.values() if isinstance(values, dict) else values:
                if type(value) is torch.Tensor:
                    yield value

    def have_changed(self) -> bool:
        """Whether an attribute of a module, or an element of one of its containers, was set, added or deleted since
        this object was made. Objects are compared by identity, so that values written in place do not count."""
        return not all(_same(now, then) for now, then in self._contents)

    def restore(self) -> None:
        """Set all attributes, elements and generators to what they were when this object was made."""
        refill(self._contents + self._generators)


def _same(now: Any, then: Any) -> bool:
    """Whether a container has the keys and, by identity, the elements of `then`."""
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(map(is_, now.values(), then.values()))
    return len(now) == len(then) and all(map(is_, now, then))


def _named_in(function: Any) -> Iterator[Any]:
    """The values that a function names and that are no locals of its own: globals, and what it closes over."""
    if (code := getattr(function, "__code__", None)) is not None:
        yield from (function.__globals__.get(name) for name in code.co_names)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # empty
                yield cell.cell_contents


Contents: TypeAlias = list[tuple[Any, Any]]
"""Pairs of a container and a shallow copy of it, and of a random generator and its state."""


def contents_of(value: Any) -> Contents:
    """All dicts, lists, sets and queues in `value` at any depth, such as in the batch of a call, and the attribute
    dicts of objects in it; each with a shallow copy. Also the random generators in it, each with its state."""
    seen, left, contents = set[int](), [value], list[tuple[Any, Any]]()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (torch.Tensor, nn.Module)) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, GENERATORS):
            contents.append((one, state_of(one)))
            continue
        own = one if type(one) in _CONTAINERS else getattr(one, "__dict__", None)
        if isinstance(own, (dict, list, set, deque)):
            contents.append((own, own.copy()))
            left += own.values() if isinstance(own, dict) else own
        if own is not one and isinstance(one, (dict, list, tuple)):
            left += one.values() if isinstance(one, dict) else one
    return contents


def refill(contents: Contents) -> None:
    """Restore the contents of all containers from their copies, and the states of the generators."""
    for container, values in contents:
        if isinstance(container, GENERATORS):
            set_state(container, values)
            continue
        container.clear()
        container.extend(values) if isinstance(container, (list, deque)) else container.update(values)


@contextmanager
def containers_restored(call: Any) -> Iterator[None]:
    """A context that on exit restores what `contents_of` finds in a call's arguments: the contents of containers and of
    objects' attribute dicts, and the states of random generators."""
    contents = contents_of(call)
    try:
        yield
    finally:
        refill(contents)


class ForwardState:
    """The attributes, buffers and random states of a model before a forward, and the values of its inputs, to be
    restored if the forward is abandoned.

    Large tensors are not copied, except inputs and parameters that are known to be written to: a forward that writes to
    another large one cannot be undone."""

    def __init__(self, model: nn.Module, attributes: Attributes, values: SavedValues) -> None:
        self.model, self.attributes = model, attributes
        self.values = values
        """The values of buffers, of other tensors that are attributes of modules, of parameters that the forward is
        known to write to, and of inputs."""
        self.device = _device_of(model)
        self.generators = generator_states(self.device)
        self._histories = histories_state(model)  # the largest magnitudes that 8-bit layers with delayed scaling keep

    @classmethod
    def of(cls, model: nn.Module, inputs: Iterable[torch.Tensor], written: Collection[int]) -> ForwardState:
        """The state of `model` and its inputs, of which the forward writes to those at the positions `written`."""
        attributes = Attributes(model)
        found = [(one, set_aside(one)) for one in (*model.buffers(), *filter(has_version, attributes.tensors()))]
        found += [(one, apart(one)) for one in written_parameters(model)]
        for number, tensor in enumerate(inputs):
            if has_version(tensor):
                found.append((tensor, on_host(tensor) if number in written else set_aside(tensor)))
        return cls(model, attributes, SavedValues.of(found))

    @classmethod
    def whole(cls, model: nn.Module) -> Self:
        """The current state of `model`, with copies in host memory of all tensors but parameters; of sparse and nested
        buffers, copies of the tensors inside."""
        attributes = Attributes(model)
        found = [part for one in model.buffers() for part in parts_of(one)]
        found += [part for one in attributes.tensors() for part in parts_of(one) if has_version(part)]
        return cls(model, attributes, SavedValues.of((part, apart(part)) for part in found))

    def can_be_undone(self) -> bool:
        """Whether every tensor that was written to since this state was taken has a copy to be restored from."""
        return self.values.can_be_undone()

    def undo(self) -> None:
        """Set the model and the generators back to this state."""
        self.attributes.restore()
        self.values.undo()
        load_histories(self.model, self._histories)
        set_generators(self.generators, self.device)


class TrainingState(ForwardState):
    """The gradients of a model at one moment, and all that a forward may change except the values of parameters (see
    `parameters_restored`). Every such change can be undone."""

    def __init__(self, model: nn.Module, attributes: Attributes, values: SavedValues) -> None:
        super().__init__(model, attributes, values)
        self.gradients = tuple((parameter, parameter.grad) for parameter in model.parameters())  # not copied

    def restore(self) -> None:
        """Set the model back to this state, but all gradients to None (see `restore_gradients`)."""
        for parameter, _ in self.gradients:
            parameter.grad = None
        self.undo()

    def restore_gradients(self) -> None:
        """Sets the parameters' `.grad` to the gradient tensors of this state."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def kept(self) -> list[torch.Tensor]:
        """The tensors that this state holds in memory: the gradients, and copies of values."""
        gradients = [gradient for _, gradient in self.gradients if gradient is not None]
        return gradients + [copy for *_, copy in self.values.tensors if copy is not None]

    def gradients_now(self) -> Tensors:
        """The model's current gradients by parameter name: copied to the CPU, or shared if they are on it already."""
        named = self.model.named_parameters()
        return {name: parameter.grad.detach().cpu() for name, parameter in named if parameter.grad is not None}

    def buffers_now(self) -> Tensors:
        """Copies of the model's current buffers in host memory, by buffer name."""
        return {name: on_host(buffer) for name, buffer in self.model.named_buffers()}


@dataclass(frozen=True, eq=False)
class CallState:
    """The random states, small buffers and other small tensors of a model before a training call, to be restored if an
    allocation fails. A call that has written to its inputs cannot be undone.

    To be fast enough for every training call, it leaves out attributes of other kinds, and tensors in lists and dicts.
    """

    model: weakref.ref[nn.Module]
    device: torch.device
    generators: tuple[Any, ...]
    values: SavedValues
    _alive: ClassVar[weakref.WeakSet[CallState]] = weakref.WeakSet()

    @classmethod
    def of(cls, model: nn.Module, inputs: Iterable[torch.Tensor], *, copying: bool = True) -> CallState:
        """The state of `model` before a call with these tensors as inputs. Without `copying`, buffers are not copied,
        so that a call that has written to one cannot be undone."""
        found = [(one, set_aside(one) if copying else None) for one in _beside_parameters(model)]
        found += [(one, None) for one in inputs if has_version(one)]
        device = _device_of(model)
        values = SavedValues.of(found)
        if written := written_parameters(model):
            values = values.with_written(written)
        state = cls(weakref.ref(model), device, generator_states(device), values)
        cls._alive.add(state)
        return state

    @classmethod
    def copies_of(cls, model: nn.Module) -> list[torch.Tensor]:
        """The copies of tensors in all living `CallState`s of `model`; none for a model on the CPU."""
        states = [state for state in cls._alive if state.model() is model and state.device.type != HOST.type]
        return [kept for state in states for *_, kept in state.values.tensors if kept is not None]

    def undo(self) -> bool:
        """Restore the tensors and generators of this state; returns False if a tensor without a copy was written to."""
        set_generators(self.generators, self.device)
        return self.values.undo()


def undo_bytes(model: nn.Module, block_bytes: int) -> int:
    """The bytes that a model's `CallState` takes on its device, each copy in blocks of `block_bytes`."""
    copied = filter(is_small, _beside_parameters(model))
    return sum(-(-one.nbytes // block_bytes) * block_bytes for one in copied)


def _beside_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The buffers of a model, and the plain tensors that are attributes of its modules."""
    modules = modules_of(model)
    tables = [table for one in modules if torch.Tensor in set(map(type, (table := vars(one)).values()))]
    attributes = [value for table in tables for value in table.values() if type(value) is torch.Tensor]
    return buffers_in(modules) + [one for one in attributes if has_version(one)]


_CONTAINERS = {dict, OrderedDict, list, set, deque}


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """A context that on exit restores parameters and all that `undone_but_parameters` restores."""
    with parameters_restored(model), undone_but_parameters(model):
        yield


@contextmanager
def undone_but_parameters(model: nn.Module) -> Iterator[None]:
    """A context that on exit restores buffers, random generators and the attributes of all modules, also the values of
    tensors among these attributes. Parameters are not restored, so the body must not change them."""
    state = ForwardState.whole(model)
    cached_parametrizations().clear()  # they have the graphs of the caller's forwards, which a backward would free
    try:
        yield
    finally:
        state.undo()


def generators_before(before: CallState | None, device: torch.device) -> tuple[Any, ...]:
    """The states of the random generators that `before` holds, if it is given and of `device`; else the current states.
    To read the current ones is slow, so a training call does it once."""
    return before.generators if before is not None and before.device == device else generator_states(device)


@contextmanager
def replaced_parameters(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[Mapping[torch.Tensor, torch.Tensor]]:
    """A context in which each parameter and buffer is replaced by `make(tensor)`, made once for a tensor in several
    places; yields the replacement of each original. At the end all module attributes and random generators are
    restored, also those that the forward changed meanwhile."""
    home = next(model.parameters()).device
    generators = generator_states(home)
    made: dict[torch.Tensor, torch.Tensor] = {}
    attributes = Attributes(model)
    try:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        if tensor not in made:
                            made[tensor] = make(tensor)
                        table[name] = made[tensor]  # type: ignore[assignment]
        yield made
    finally:
        attributes.restore()
        set_generators(generators, home)

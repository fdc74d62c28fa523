"""The state that a forward and backward change, saved so that a second run can start from the same state."""

from __future__ import annotations

import pickle
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import nn

from memopt.compat.host import HOST, is_on_host
from memopt.compat.modules import buffers_in, modules_of
from memopt.compat.tensors import has_no_storage, is_wrapper, same_bits, set_values, special_kind, with_memory
from memopt.device.devices import device_of
from passes.ops.fp8_formats import histories_state, load_histories

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingState:
    """The gradients, buffers and random states of a model at one moment. Parameters are not saved (see
    `parameters_restored`)."""

    model: nn.Module
    device: torch.device
    gradients: tuple[tuple[nn.Parameter, torch.Tensor | None], ...]
    buffers: tuple[tuple[nn.Module, dict[str, torch.Tensor | None], dict[str, list[torch.Tensor]]], ...]
    """Each module with its table of buffers, and with copies of their values in host memory; for sparse and nested
    buffers, copies of the tensors inside."""
    generators: tuple[Any, ...]
    histories: Mapping[str, Mapping[str, torch.Tensor]]
    """The histories of largest magnitudes that 8-bit layers with delayed scaling keep."""

    @classmethod
    def of(cls, model: nn.Module) -> TrainingState:
        """The current state of `model`. Buffers are copied to host memory; gradients are referenced, not copied."""
        device = _device_of(model)
        tables = ((module, dict(module._buffers)) for module in model.modules())
        return cls(
            model,
            device,
            tuple((parameter, parameter.grad) for parameter in model.parameters()),
            tuple(
                (module, table, {name: list(map(_apart, _parts(buffer))) for name, buffer in table.items()})
                for module, table in tables
            ),
            generator_states(device),
            histories_state(model),
        )

    def restore(self) -> None:
        """Sets buffers, generators and the histories of 8-bit layers back to this state, and all gradients to None."""
        for parameter, _ in self.gradients:
            parameter.grad = None
        self.undo_forward()

    def undo_forward(self) -> None:
        """Sets buffers, generators and the histories of 8-bit layers back to this state."""
        for module, table, values in self.buffers:
            module._buffers.clear()
            module._buffers.update(table)
            for name, copies in values.items():
                for part, value in zip(_parts(table[name]), copies, strict=True):
                    if not same_bits(part.cpu(), value):
                        set_values(part, value)
        load_histories(self.model, self.histories)
        set_generators(self.generators, self.device)

    def restore_gradients(self) -> None:
        """Sets the parameters' `.grad` to the gradient tensors of this state."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def kept(self) -> list[torch.Tensor]:
        """The tensors that this state holds in memory: the gradients, and the copies of buffers."""
        gradients = [gradient for _, gradient in self.gradients if gradient is not None]
        return gradients + [part for *_, values in self.buffers for parts in values.values() for part in parts]

    def gradients_now(self) -> Tensors:
        """The model's current gradients by parameter name: copied to the CPU, or shared if they are on it already."""
        named = self.model.named_parameters()
        return {name: parameter.grad.detach().cpu() for name, parameter in named if parameter.grad is not None}

    def buffers_now(self) -> Tensors:
        """Copies of the model's current buffers in host memory, by buffer name."""
        return {name: on_host(buffer) for name, buffer in self.model.named_buffers()}


def _device_of(model: nn.Module) -> torch.device:
    """The device that a model is trained on. Frozen parameters may lie on the host; those that are trained do not."""
    parameters = list(model.parameters())
    return next((one for one in parameters if one.requires_grad), parameters[0]).device


def _parts(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors that hold a tensor's values and may be written to in place: none on "meta", and none in oneDNN's
    layout."""
    if tensor is None or is_wrapper(tensor):
        return [] if tensor is None else [tensor]
    with torch.no_grad():
        return [part for part in with_memory([tensor]) if not (has_no_storage(part) or part.is_meta)]


class Attributes:
    """The attributes of all modules of a model, so that they can be restored. Included are the elements of the modules'
    dicts, lists, queues and sets (parameters, buffers and hooks among them), and the states of random generators, also
    of those outside of the model that a module's forward names.

    Values that are written in place are not restored; for what `tensors` yields, `values_restored` does that."""

    def __init__(self, model: nn.Module) -> None:
        found = {id(vars(one)): vars(one) for one in model.modules()}
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in found.values()]
        held = {id(value): value for table, _ in self._tables for value in table.values() if type(value) in _CONTAINERS}
        self._contents = [(container, container.copy()) for container in held.values()]
        values = {id(value): value for table, _ in self._tables for value in table.values()}
        values |= {
            id(value): value
            for forward in {type(one).forward for one in model.modules()}
            for value in _named_in(forward)
        }
        self._generators = [(one, _state_of(one)) for one in values.values() if isinstance(one, _GENERATORS)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors, but no subclasses, among the attributes and their elements, without parameters and buffers."""
        tables = [values for _, values in self._tables]
        own = {id(table[name]) for table in tables for name in ("_parameters", "_buffers") if name in table}
        for values in (*tables, *(values for container, values in self._contents if id(container) not in own)):
            for value in values.values() if isinstance(values, dict) else values:
                if type(value) is torch.Tensor:
                    yield value

    def have_changed(self) -> bool:
        """Whether an attribute of a module, or an element of one of its containers, was set, added or deleted since
        this object was made. Objects are compared by identity, so that values written in place do not count."""
        tables = [(table, values) for table, values in self._tables]
        tables += [(container, values) for container, values in self._contents if isinstance(container, dict)]
        others = [(container, values) for container, values in self._contents if not isinstance(container, dict)]
        same = all(now.keys() == then.keys() and all(map(is_, now.values(), then.values())) for now, then in tables)
        return not (same and all(len(now) == len(then) and all(map(is_, now, then)) for now, then in others))

    def restore(self) -> None:
        """Set all attributes, elements and generators to what they were."""
        for table, values in self._tables:
            table.clear()
            table.update(values)
        refill(self._contents)
        for generator, state in self._generators:
            _set_state(generator, state)


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
    """The dicts, lists, sets and queues within nested containers, such as the batch of a call, and the attributes of
    objects there, each with a copy of its contents; and the random generators there with their states."""
    seen, left, contents = set[int](), [value], list[tuple[Any, Any]]()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (torch.Tensor, nn.Module)) or callable(one):
            continue
        seen.add(id(one))
        if isinstance(one, _GENERATORS):
            contents.append((one, _state_of(one)))
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
        if isinstance(container, _GENERATORS):
            _set_state(container, values)
            continue
        container.clear()
        container.extend(values) if isinstance(container, (list, deque)) else container.update(values)


@contextmanager
def containers_restored(call: Any) -> Iterator[None]:
    """A context after which the dictionaries and lists among a call's arguments have the contents that they had before
    it, and random generators among them their states."""
    contents = contents_of(call)
    try:
        yield
    finally:
        refill(contents)


_GENERATORS = random.Random, np.random.Generator, np.random.RandomState, torch.Generator


def _state_of(generator: Any) -> Any:
    """The state of a random generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


@dataclass(frozen=True)
class _Values:
    """Tensors with copies of their values, by which writes to them are undone. The tensors are held by weak reference:
    a forward may replace a module's attribute, and the replaced tensor may be a view of a large one.

    On the CPU the copies lie outside of torch's memory, so that they are no part of the step. On other devices they lie
    on the device, where the account counts those of a `CallState` (`undo_bytes`).
    """

    tensors: tuple[tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None], ...]
    """Each tensor with its version counter (`Tensor._version`) at that time, and a copy of its values or None."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> _Values:
        """Tensors at their present versions; each is given with a copy of its values, or None for no copy. Tensors made
        in inference mode, which have no version, are left out: outside of it nothing can write to them."""
        versioned = ((tensor, kept) for tensor, kept in tensors if not tensor.is_inference())
        return cls(tuple([(weakref.ref(tensor), tensor._version, kept) for tensor, kept in versioned]))

    def with_written(self, tensors: Iterable[torch.Tensor]) -> _Values:
        """These values, and further tensors without copies that always count as written to, since the forward is known
        to write to them, perhaps by kernels that do not raise the version."""
        return _Values((*self.tensors, *((weakref.ref(tensor), _NEVER, None) for tensor in tensors)))

    def copies(self) -> dict[int, torch.Tensor]:
        """The copies, by the `id` of their tensor, of those tensors that are still alive."""
        return {id(tensor): kept for one, _, kept in self.tensors if kept is not None and (tensor := one()) is not None}

    def alive(self) -> list[torch.Tensor]:
        """The tensors that are still alive."""
        return [tensor for one, *_ in self.tensors if (tensor := one()) is not None]

    def written(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """The tensors that are still alive and whose version has changed since this object was made: their positions,
        the tensors, and their copies or None."""
        for number, (reference, version, kept) in enumerate(self.tensors):
            tensor = reference()
            if tensor is not None and tensor._version != version:
                yield number, tensor, kept

    def can_be_undone(self) -> bool:
        """Whether every tensor that was written to since this object was made has a copy."""
        return all(kept is not None for *_, kept in self.written())

    def undo(self) -> bool:
        """Give tensors that were written to their old values again; returns False where one has no copy. Values are
        compared too, since some kernels, such as that of batch normalisation, write without raising the version."""
        for reference, version, kept in self.tensors:
            if kept is None or (tensor := reference()) is None:
                continue
            if tensor._version != version or not same_bits(tensor, kept.to(tensor.device)):
                set_values(tensor, kept)
        return self.can_be_undone()


@dataclass(frozen=True)
class ForwardState:
    """The attributes, buffers and random states of a model before a forward, and the values of its inputs, to be
    restored if the forward is abandoned.

    Large tensors are not copied, except inputs and parameters that are known to be written to: a forward that writes to
    another large one cannot be undone."""

    model: nn.Module
    device: torch.device
    attributes: Attributes
    values: _Values
    """The values of buffers, of other tensors that are attributes of modules, of parameters that the forward is known
    to write to, and of inputs."""
    generators: tuple[Any, ...]
    histories: Mapping[str, Mapping[str, torch.Tensor]]

    @classmethod
    def of(cls, model: nn.Module, inputs: Iterable[torch.Tensor], written: Collection[int]) -> ForwardState:
        """The current state of `model` and its inputs. `written` has the positions of the inputs that the forward is
        known to write to."""
        attributes = Attributes(model)
        found = [(one, _set_aside(one)) for one in (*model.buffers(), *filter(_has_version, attributes.tensors()))]
        found += [(one, _apart(one)) for one in written_parameters(model)]
        for number, tensor in enumerate(inputs):
            if _has_version(tensor):
                found.append((tensor, on_host(tensor) if number in written else _set_aside(tensor)))
        device = _device_of(model)
        return cls(model, device, attributes, _Values.of(found), generator_states(device), histories_state(model))

    def can_be_undone(self) -> bool:
        """Whether every tensor that was written to since this state was taken has a copy to be restored from."""
        return self.values.can_be_undone()

    def undo(self) -> None:
        """Set the model and the generators back to this state."""
        self.attributes.restore()
        self.values.undo()
        load_histories(self.model, self.histories)
        set_generators(self.generators, self.device)


@dataclass(frozen=True, eq=False)
class CallState:
    """The random states, small buffers and other small tensors of a model before a training call, to be restored if an
    allocation fails. A call that has written to its inputs cannot be undone.

    To be fast enough for every training call, it leaves out attributes of other kinds, and tensors in lists and dicts.
    """

    model: weakref.ref[nn.Module]
    device: torch.device
    generators: tuple[Any, ...]
    values: _Values
    _alive: ClassVar[weakref.WeakSet[CallState]] = weakref.WeakSet()

    @classmethod
    def of(cls, model: nn.Module, inputs: Iterable[torch.Tensor], *, copying: bool = True) -> CallState:
        """The state of `model` before a call with these tensors as inputs. Without `copying`, buffers are not copied,
        so that a call that has written to one cannot be undone."""
        found = [(one, _set_aside(one) if copying else None) for one in _beside_parameters(model)]
        found += [(one, None) for one in inputs if _has_version(one)]
        device = _device_of(model)
        values = _Values.of(found).with_written(written_parameters(model))
        state = cls(weakref.ref(model), device, generator_states(device), values)
        cls._alive.add(state)
        return state

    @classmethod
    def copies_of(cls, model: nn.Module) -> list[torch.Tensor]:
        """The copies on devices other than the CPU that belong to any state of `model` that is still alive."""
        states = [state for state in cls._alive if state.model() is model and state.device.type != HOST.type]
        return [kept for state in states for *_, kept in state.values.tensors if kept is not None]

    def undo(self) -> bool:
        """Restore the tensors and generators of this state; returns False if a tensor without a copy was written to."""
        set_generators(self.generators, self.device)
        return self.values.undo()


def undo_bytes(model: nn.Module, block_bytes: int) -> int:
    """The bytes that the copies in a model's `CallState` take on its device, each rounded up to blocks of
    `block_bytes`."""
    copied = filter(_is_small, _beside_parameters(model))
    return sum(-(-one.nbytes // block_bytes) * block_bytes for one in copied)


def _beside_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The buffers of a model, and the plain tensors that are attributes of its modules."""
    modules = modules_of(model)
    tables = [table for one in modules if torch.Tensor in set(map(type, (table := vars(one)).values()))]
    attributes = [value for table in tables for value in table.values() if type(value) is torch.Tensor]
    return buffers_in(modules) + [one for one in attributes if _has_version(one)]


def _set_aside(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of a tensor on its device, if it is small and plain, else None; on the CPU in numpy's memory."""
    if not _is_small(tensor):
        return None
    return _apart(tensor) if is_on_host(tensor) else tensor.detach().clone()


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is so small, and plain, that it is copied before each forward."""
    return not special_kind(tensor) and tensor.nbytes <= _COPIED_BYTES


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory; that of a tensor on the CPU is allocated by numpy, so that it does not count
    as memory of the step."""
    return _outside(tensor)()


def _outside(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns a copy of the tensor's present values, as `_apart` does. The copy becomes a tensor only
    then: a meter would count a tensor."""
    bits, dtype = _BITS.get(tensor.itemsize), tensor.dtype
    if not (_has_version(tensor) and is_on_host(tensor)) or bits is None or tensor.is_conj() or tensor.is_neg():
        copy = on_host(tensor)
        return lambda: copy
    array = np.empty(tensor.shape, f"i{tensor.itemsize}")
    # Not by `tensor.numpy()`, after which the tensor could no longer be resized.
    torch.from_numpy(array).copy_(tensor.detach().view(bits))
    return lambda: torch.from_numpy(array).view(dtype)


_CONTAINERS = {dict, OrderedDict, list, set, deque}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NEVER = -1
"""A version that no tensor has."""
_COPIED_BYTES = 64 * 1024


@contextmanager
def values_restored(tensors: Iterable[torch.Tensor], written: set[int] | None = None) -> Iterator[None]:
    """A context after which those of `tensors` that were written to in it have their old values again; their positions
    in `tensors` are added to `written`. Copies of all are held in host memory during the block. Of sparse and nested
    tensors, the tensors inside are restored. Other tensor subclasses, and tensors on "meta" or made in inference mode,
    are skipped."""
    parts = ((number, part) for number, tensor in enumerate(tensors) for part in _parts(tensor))
    numbered = [(number, part) for number, part in parts if _has_version(part)]
    before = _Values.of((tensor, _apart(tensor)) for _, tensor in numbered)
    try:
        yield
    finally:
        if written is not None:
            written.update(numbered[place][0] for place, *_ in before.written())
        before.undo()


_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""For each model, the names of the parameters that its forward was seen to write to."""


def written_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a forward of the model wrote to within `parameters_restored`, as that of a momentum encoder
    does."""
    names = _written.get(model, ())
    return [parameter for name, parameter in model.named_parameters() if name in names] if names else []


@contextmanager
def parameters_restored(model: nn.Module, *, restore: bool = True) -> Iterator[None]:
    """A context after which parameters that the forward has written to have their old values again, unless `restore` is
    False; `written_parameters` returns them from then on.

    Copies are kept in host memory during the block: of all parameters, or, if that takes more than half of what is
    free, of those that are not trained; of none if even these are too large.
    """
    named = {
        name: one for name, one in model.named_parameters() if _has_version(one) and one.untyped_storage().nbytes()
    }
    frozen = {name: one for name, one in named.items() if not one.requires_grad}
    free = device_of(HOST).free_bytes(HOST)
    fit = (some for some in (named, frozen) if free is None or sum(one.nbytes for one in some.values()) <= free // 2)
    kept = {name: (one, _outside(one)) for name, one in next(fit, {}).items()}
    try:
        yield
    finally:
        for name, (parameter, before) in kept.items():
            value = before().to(parameter.device)
            if not same_bits(parameter, value):
                if restore:
                    set_values(parameter, value)
                _written.setdefault(model, set()).add(name)


@contextmanager
def undone(model: nn.Module) -> Iterator[None]:
    """A context after which parameters, buffers, random generators and the attributes of all modules are as before,
    also the values of tensors among these attributes."""
    with parameters_restored(model), undone_but_parameters(model):
        yield


@contextmanager
def undone_but_parameters(model: nn.Module) -> Iterator[None]:
    """As `undone`, for a block that does not change the parameters."""
    state, attributes = TrainingState.of(model), Attributes(model)
    with values_restored(attributes.tensors()):
        try:
            yield
        finally:
            attributes.restore()
            state.undo_forward()


def _has_version(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one that has values and counts how often it is written to."""
    if special_kind(tensor):
        return False
    return type(tensor) in (torch.Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_inference())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in host memory."""
    return tensor.detach().to(HOST, copy=True)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of four random generators: Python's, numpy's, torch's on the CPU and torch's on `device`.

    Of torch's generator on the CPU a copy is returned, since a state tensor would count as memory of the step.
    """
    own = device_of(device).generator_state(device)
    return random.getstate(), np.random.get_state(), torch.default_generator.clone_state(), own


def draws_so_far() -> Any:
    """A value that changes when random numbers are drawn from Python's generator or numpy's."""
    return random.getstate(), pickle.dumps(np.random.get_state())


_HIGHEST_WORD = 0x12DD9BB3
"""The word in the state of a Mersenne Twister for which it returns the highest number."""
_EXTREME_WORDS = 600


@contextmanager
def extreme_draws(*, highest: bool) -> Iterator[None]:
    """A context in which Python's generator and numpy's draw their highest or lowest numbers, for some hundred draws;
    after it they are as before it."""
    before = random.getstate(), np.random.get_state()
    version, words, _ = random.Random(0).getstate()
    words = *[_HIGHEST_WORD if highest else 0] * _EXTREME_WORDS, *words[_EXTREME_WORDS:-1]
    random.setstate((version, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, np.uint32), 0, 0, 0.0))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def generators_before(before: CallState | None, device: torch.device) -> tuple[Any, ...]:
    """The generator states in `before`, if it is given and of this device; else the current ones. Reading the current
    ones is slow, so a training call reads them once."""
    return before.generators if before is not None and before.device == device else generator_states(device)


def set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Sets the generators to states that `generator_states` returned for the same device."""
    python, numpy, host, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host.get_state())
    if own is not None:
        device_of(device).set_generator_state(device, own)

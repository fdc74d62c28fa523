"""Values of tensors, saved so that what a forward writes to them can be undone; and random generators: their states,
read and set, and draws at the ends of their range."""

from __future__ import annotations

import pickle
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from memopt.compat.host import HOST, is_on_host
from memopt.compat.tensors import has_no_storage, is_wrapper, same_bits, set_values, special_kind, with_memory
from memopt.device.devices import device_of

_NEVER = -1
"""A version that no tensor has."""
_COPIED_BYTES = 64 * 1024
_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""For each model, the names of the parameters that its forward was seen to write to."""


def parts_of(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    """The tensors that hold a tensor's values and may be written to in place: the tensor itself, or those inside of a
    sparse or nested one. An empty list for None, and for tensors on "meta" or in oneDNN's layout."""
    if tensor is None or is_wrapper(tensor):
        return [] if tensor is None else [tensor]
    with torch.no_grad():
        return [part for part in with_memory([tensor]) if not (has_no_storage(part) or part.is_meta)]


@dataclass(frozen=True)
class SavedValues:
    """Tensors with copies of their values, by which writes to them are undone. The tensors are held by weak reference:
    a forward may replace a module's attribute, and the replaced tensor may be a view of a large one.

    On the CPU the copies lie outside of torch's memory, so that they are no part of the step. On other devices they lie
    on the device, where the account counts those of a `CallState` (`undo_bytes`).
    """

    tensors: tuple[tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None], ...]
    """Each tensor with its version counter (`Tensor._version`) when this object was made, and a copy of its values or
    None."""

    @classmethod
    def of(cls, tensors: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> SavedValues:
        """The object for pairs of a tensor and a copy of its values (None: no copy), with the current version counter
        of each tensor. Tensors made in inference mode, which have none, are left out: outside of that mode nothing can
        write to them."""
        return cls(tuple([(weakref.ref(one), one._version, kept) for one, kept in tensors if not one.is_inference()]))

    def with_written(self, tensors: Iterable[torch.Tensor]) -> SavedValues:
        """These values, and further tensors without copies that always count as written to, since the forward is known
        to write to them, perhaps by kernels that do not raise the version."""
        return SavedValues((*self.tensors, *((weakref.ref(tensor), _NEVER, None) for tensor in tensors)))

    def copies(self) -> dict[int, torch.Tensor]:
        """The copies, by the `id` of their tensor, of those tensors that are still alive."""
        return {id(tensor): kept for one, _, kept in self.tensors if kept is not None and (tensor := one()) is not None}

    def alive(self) -> list[torch.Tensor]:
        """The tensors that are still alive."""
        return [tensor for one, *_ in self.tensors if (tensor := one()) is not None]

    def written(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """The living tensors whose version has changed: their positions, the tensors, their copies or None."""
        for number, (reference, version, kept) in enumerate(self.tensors):
            tensor = reference()
            if tensor is not None and tensor._version != version:
                yield number, tensor, kept

    def can_be_undone(self) -> bool:
        """Whether every tensor that was written to since this object was made has a copy."""
        return all(kept is not None for *_, kept in self.written())

    def undo(self) -> bool:
        """Copy the saved values back into the tensors that were written to since; returns whether each of these has a
        copy. Those of an unchanged version are compared, since some kernels, as of batch normalisation, do not raise
        it."""
        for reference, version, kept in self.tensors:
            if kept is None or (tensor := reference()) is None:
                continue
            if tensor._version != version or not same_bits(tensor, kept.to(tensor.device)):
                set_values(tensor, kept)
        return self.can_be_undone()


def set_aside(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy of a tensor on its device, if it is small and plain, else None; on the CPU in numpy's memory."""
    if not is_small(tensor):
        return None
    return apart(tensor) if is_on_host(tensor) else tensor.detach().clone()


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small enough to be copied before each forward, and plain (see `special_kind`)."""
    return not special_kind(tensor) and tensor.nbytes <= _COPIED_BYTES


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory; that of one on the CPU is numpy's, so that it is no memory of the step."""
    return _outside(tensor)()


def _outside(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns a copy of the tensor's present values as a tensor, which a meter counts only then."""
    dtype, plain = tensor.dtype, has_version(tensor) and is_on_host(tensor)
    if not plain or tensor.itemsize > 8 or tensor.is_conj() or tensor.is_neg():
        copy = on_host(tensor)
        return lambda: copy
    array = np.empty(tensor.shape, f"i{tensor.itemsize}")
    bits = torch.from_numpy(array)
    bits.copy_(tensor.detach().view(bits.dtype))  # not by `numpy()`, after which the tensor could not be resized
    return lambda: torch.from_numpy(array).view(dtype)


@contextmanager
def values_restored(tensors: Iterable[torch.Tensor], written: set[int] | None = None) -> Iterator[None]:
    """A context after which those of `tensors` that its block wrote to have their old values again; their positions are
    added to `written`. Copies are in host memory meanwhile. Sparse and nested tensors are restored inside; other
    subclasses, and tensors on "meta" or of inference mode, are skipped."""
    parts = ((number, part) for number, tensor in enumerate(tensors) for part in parts_of(tensor))
    numbered = [(number, part) for number, part in parts if has_version(part)]
    before = SavedValues.of((tensor, apart(tensor)) for _, tensor in numbered)
    try:
        yield
    finally:
        if written is not None:
            written.update(numbered[place][0] for place, *_ in before.written())
        before.undo()


def written_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that a forward wrote to within `parameters_restored`, as a momentum encoder's does."""
    names = _written.get(model, ())
    return [parameter for name, parameter in model.named_parameters() if name in names] if names else []


@contextmanager
def parameters_restored(model: nn.Module, *, restore: bool = True) -> Iterator[None]:
    """A context after which parameters that a forward wrote to have their old values again, unless `restore` is False,
    and are among `written_parameters`. Copies are in host memory meanwhile: of all, of the frozen ones if these take
    more than half of what is free, or of none."""
    named = {name: one for name, one in model.named_parameters() if has_version(one) and one.untyped_storage().nbytes()}
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


def has_version(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one that has values and counts how often it is written to."""
    if special_kind(tensor):
        return False
    return type(tensor) in (torch.Tensor, nn.Parameter) and not (tensor.is_meta or tensor.is_inference())


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the tensor in host memory."""
    return tensor.detach().to(HOST, copy=True)


GENERATORS = random.Random, np.random.Generator, np.random.RandomState, torch.Generator
_HIGHEST_WORD = 0x12DD9BB3
"""The word in the state of a Mersenne Twister for which it returns the highest number."""
_EXTREME_WORDS = 600


def state_of(generator: Any) -> Any:
    """The state of a random generator, which is of one of the types in `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def generator_states(device: torch.device) -> tuple[Any, ...]:
    """The states of Python's random generator, numpy's, torch's on the CPU and torch's on `device`. That on the CPU is
    a copied generator, since a state tensor would count as memory of the step."""
    own = device_of(device).generator_state(device)
    return random.getstate(), np.random.get_state(), torch.default_generator.clone_state(), own


def draws_so_far() -> Any:
    """A value that changes when random numbers are drawn from Python's generator or numpy's."""
    return random.getstate(), pickle.dumps(np.random.get_state())


@contextmanager
def extreme_draws(*, highest: bool) -> Iterator[None]:
    """A context in which Python's generator and numpy's draw their highest or lowest numbers, for some hundred draws.
    At its end both get back the states that they had at its beginning."""
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


def set_generators(states: tuple[Any, ...], device: torch.device) -> None:
    """Sets the generators to states that `generator_states` returned for the same device."""
    python, numpy, host, own = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host.get_state())
    if own is not None:
        device_of(device).set_generator_state(device, own)

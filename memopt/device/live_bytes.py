"""Counts the bytes of the storages that operators make while a dispatch mode is active, until they are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memopt.compat.dispatch import TorchDispatchMode, kernels_as_in_eager_mode
from memopt.compat.fakes import FakeTensor, device_asked_for, device_type_of
from memopt.compat.host import HOST
from memopt.compat.storages import storages_of
from memopt.device.generator_states import states_reported
from memopt.device.op_call import tensors_in


class LiveBytes(TorchDispatchMode):
    """The bytes alive of storages that operators made while the mode was active, and the most that were alive at once.

    A storage counts once, however many views it has, from the operator that made it until the last tensor on it dies.
    Storages that an operator was given and no counted operator made do not count, but for states of the CPU's random
    generator and what `torch.tensor` makes of numbers. Subclasses say how an operator is
    run (`run`) and what its kernel holds beside its arguments and results (`workspace_bytes`).

    Python collects no garbage while the mode is active: a collection can take the Python object of a storage whose
    memory lives on, so that the next tensor on it would count as new. Counts would differ from run to run.

    Args:
        block_bytes: storages are rounded up to multiples of this, as an allocator does.
        device_type: only storages on devices of this type count; None counts all.
    """

    def __init__(self, *, block_bytes: int = 1, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        """Bytes of the counted storages that are alive now."""
        self.peak_bytes = 0
        """The most bytes alive during an operator, its workspace included. May be set to 0 to begin a new phase."""
        self._block_bytes, self._device_type = block_bytes, device_type
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._counted: weakref.WeakKeyDictionary[torch.UntypedStorage, _Bytes] = weakref.WeakKeyDictionary()
        """The bytes that each of the counted storages counts for."""
        self._entered: list[ExitStack] = []
        """What ends with each entry of the mode."""

    def __enter__(self) -> LiveBytes:
        entry = ExitStack()
        entry.enter_context(_no_collections())
        entry.enter_context(states_reported(self.count_state, during_captures=self.ignore_compile_internals()))
        self._entered.append(entry)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        with self._entered.pop():
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := device_asked_for(func, args)) is not None:
            return device
        if any(tensor.layout is torch.jagged for tensor in tensors_in((args, list(kwargs.values())))):
            return NotImplemented  # it runs on the tensors inside
        result = self.run(func, args, kwargs)
        if func.is_view and isinstance(args[0], FakeTensor):  # no storage is made, no kernel runs
            return result
        if func is not torch.ops.aten.lift_fresh.default:  # its argument has just been made of numbers
            self.exclude((args, list(kwargs.values())))
        self.count(result)
        self.raise_peak(self.workspace_bytes(func, args, kwargs, result))
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result."""
        with kernels_as_in_eager_mode():
            return func(*args, **kwargs)

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """Bytes that the operator's kernel holds beside its arguments and results; 0 unless a subclass says more."""
        return 0

    def exclude(self, tensors: Any) -> None:
        """Leave the storages of these tensors (nested tuples and lists) out of the count, unless they are in it."""
        for tensor in tensors_in(tensors):
            self._known.update(_storages(tensor))

    def count(self, tensors: Any) -> None:
        """Count those storages of these tensors (nested tuples and lists) that are new, until they die."""
        for tensor in tensors_in(tensors):
            if self._device_type not in (None, device_type_of(tensor)):
                continue
            for storage in _storages(tensor):
                if storage not in self._known:
                    self._known.add(storage)
                    self._count(storage)
        self.raise_peak(0)

    def count_state(self, state: torch.Tensor) -> None:
        """Count a state of the CPU's random generator until it is freed. The peak is raised by what runs meanwhile:
        Dynamo holds some while it compiles."""
        if self._device_type in (None, HOST.type):
            self._known.add(storage := state.untyped_storage())
            self._count(storage)

    def recount(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors with the bytes that they have now: nothing tells when one is resized."""
        for tensor in tensors:
            self._known.add(storage := tensor.untyped_storage())
            self._count(storage)

    def has_counted(self, value: Any) -> bool:
        """Whether a value is a tensor in a counted storage."""
        return isinstance(value, torch.Tensor) and any(storage in self._counted for storage in _storages(value))

    def bytes_among(self, tensors: Any) -> int:
        """The bytes of the counted storages that these tensors lie in."""
        storages = {storage for tensor in tensors_in(tensors) for storage in _storages(tensor)}
        return sum(storage.nbytes() for storage in storages if storage in self._counted)

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the peak to the bytes alive now and `workspace_bytes` beside them, if that is more."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        held = self._counted.get(storage)
        if held is None:
            held = self._counted[storage] = _Bytes()
            weakref.finalize(storage, self._free, held)
        nbytes = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        self.live_bytes += nbytes - held.nbytes
        held.nbytes = nbytes

    def _free(self, held: _Bytes) -> None:
        self.live_bytes -= held.nbytes


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor; of a wrapper its own, as what is inside is counted where operators make it."""
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else storages_of(tensor)


@contextmanager
def _no_collections() -> Iterator[None]:
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


@dataclass
class _Bytes:
    nbytes: int = 0

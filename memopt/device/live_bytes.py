"""Counts the bytes of the storages that operators make while a dispatch mode is active, until they are freed, and lists
the allocator's calls: which blocks are allocated, and when each is freed. An operator written in Python is run dry: on
tensors without memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from memopt.compat.fakes import FakeTensor, FakeTensorMode, device_asked_for, device_type_of
from memopt.compat.host import HOST
from memopt.compat.operators import TorchDispatchMode, kernels_as_in_eager_mode, plain_tensors
from memopt.compat.tensors import storages_of
from memopt.device.op_call import OpCall, describe, tensors_in
from memopt.solver.problem import BlockCall
from passes.compat import replaced
from passes.ops.linear_cross_entropy import IMPLEMENTATIONS


class _Reporting:
    """A generator, for the functions of `torch.random`, whose states are reported: `torch.utils.checkpoint` and
    `torch.random.fork_rng` each hold one, which dispatch modes do not see."""

    def __init__(self, generator: Any, report: Callable[[torch.Tensor], None]) -> None:
        self._generator, self._report = generator, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_state(self) -> torch.Tensor:
        state: torch.Tensor = self._generator.get_state()
        self._report(state)
        return state


class LiveBytes(TorchDispatchMode):
    """The bytes alive of storages that operators made while the mode was active, and the most that were alive at once,
    of devices of type `device_type` (None counts all), each rounded up to multiples of `block_bytes`, as an allocator
    does.

    A storage counts once, however many views it has, from the operator that made it until the last tensor on it dies.
    Of storages that no operator makes, only states of the CPU's random generator count, and what `torch.tensor` makes
    from numbers. Subclasses define how an operator is run (`run`) and what its kernel holds besides its arguments and
    results (`workspace_bytes`).

    Python collects no garbage while the mode is active: a collection can take the Python object of a storage whose
    memory lives on, so that the next tensor on it would count as new."""

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
        """For each time that the mode was entered and not left yet, the contexts that end with it."""

    def __enter__(self) -> LiveBytes:
        functions: Any = torch.random
        reporting = _Reporting(functions.default_generator, self.count_state)
        if self.ignore_compile_internals():  # Dynamo may capture code meanwhile, and leaves the reports out
            disable: Any = torch.compiler.disable
            reporting.get_state = disable(reporting.get_state)  # type: ignore[method-assign]
        entry = ExitStack()
        entry.enter_context(_no_collections())
        entry.enter_context(replaced(functions, "default_generator", reporting))
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
            return NotImplemented  # the operator is then dispatched for the tensors inside
        result = self.run(func, args, kwargs)
        if func.is_view and isinstance(args[0], FakeTensor):  # no storage is made, no kernel runs
            return result
        if func is not torch.ops.aten.lift_fresh.default:  # its argument has just been made of numbers
            self.exclude((args, list(kwargs.values())))
        self.count(result)
        self.raise_peak(self.workspace_bytes(func, args, kwargs, result))
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and return its result; a subclass may make it up instead."""
        with kernels_as_in_eager_mode():
            return func(*args, **kwargs)

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes that the operator's kernel holds besides its arguments and results: 0 here, more in subclasses."""
        return 0

    def exclude(self, tensors: Any) -> None:
        """Do not count the storages of these tensors (in nested tuples and lists), unless they are counted already."""
        for tensor in tensors_in(tensors):
            self._known.update(_storages(tensor))

    def count(self, tensors: Any) -> None:
        """Count the storages of these tensors (in nested tuples and lists) until freed, unless counted or excluded."""
        for tensor in tensors_in(tensors):
            if self._device_type not in (None, device_type_of(tensor)):
                continue
            for storage in _storages(tensor):
                if storage not in self._known:
                    self._known.add(storage)
                    self._count(storage)
        self.raise_peak(0)

    def count_state(self, state: torch.Tensor) -> None:
        """Count a state of the CPU's random generator until it is freed. The peak is raised only by operators that run
        meanwhile, not by this call, since Dynamo holds such states while it compiles."""
        if self._device_type in (None, HOST.type):
            self._known.add(storage := state.untyped_storage())
            self._count(storage)

    def recount(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the storages of these tensors with their current bytes, where they may have been resized: dispatch
        modes do not see that."""
        for tensor in tensors:
            self._known.add(storage := tensor.untyped_storage())
            self._count(storage)

    def has_counted(self, value: Any) -> bool:
        """Whether a value is a tensor in a counted storage."""
        return isinstance(value, torch.Tensor) and any(storage in self._counted for storage in _storages(value))

    def bytes_among(self, tensors: Any) -> int:
        """The bytes of the counted storages that these tensors are views of."""
        storages = {storage for tensor in tensors_in(tensors) for storage in _storages(tensor)}
        return sum(storage.nbytes() for storage in storages if storage in self._counted)

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the peak to the bytes alive now plus `workspace_bytes`, if that is more."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        held = self._counted.get(storage)
        if held is None:
            held = self._counted[storage] = _Bytes()
            _when_freed(storage, self._free, held)
        nbytes = -(-storage.nbytes() // self._block_bytes) * self._block_bytes
        self.live_bytes += nbytes - held.nbytes
        held.nbytes = nbytes

    def _free(self, held: _Bytes) -> None:
        self.live_bytes -= held.nbytes


def _when_freed(storage: torch.UntypedStorage, method: Callable[[Any], None], value: Any) -> None:
    """Call `method(value)` when the storage is freed, unless the method's object is freed before: the storage may live
    on in a cache, and must not keep the count, and with it a model, in memory."""
    weak = weakref.WeakMethod(method)
    weakref.finalize(storage, lambda: None if (counts := weak()) is None else counts(value))


def _storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor; of a wrapper its own, as the tensors inside are counted where operators make them."""
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


class BlockCalls(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts as `LiveBytes` does, and lists the allocations and frees of all storages and workspaces. Blocks are
    numbered in the order in which they are allocated."""

    def __init__(self, *, block_bytes: int = 1) -> None:
        super().__init__(block_bytes=block_bytes)
        self.calls: list[BlockCall] = []
        self.sizes: list[int] = []
        """The bytes of each block, by its number."""
        self.number: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        """The number of the block of each storage that is alive."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result. An operator with an `out=` tensor is not run, since torch lacks such operators for
        some dtypes; the `out=` tensor itself is returned."""
        return kwargs["out"] if isinstance(kwargs.get("out"), torch.Tensor) else func(*args, **kwargs)

    def count(self, tensors: Any) -> None:
        """Count those storages of these tensors that are not counted yet, and list their allocations and frees."""
        for tensor in tensors_in(tensors):
            before = self.live_bytes
            super().count(tensor)
            if self.live_bytes > before:
                storage = tensor.untyped_storage()
                self.number[storage] = self._allocated(self.live_bytes - before)
                _when_freed(storage, self._freed, self.number[storage])

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the peak, and list the workspace as a block that is freed at once."""
        super().raise_peak(workspace_bytes)
        if workspace_bytes:
            self._freed(self._allocated(workspace_bytes))

    def list_within(self, calls: Sequence[BlockCall], workspace_bytes: int, results: Sequence[torch.Tensor]) -> None:
        """Count an operator's `results`, and list the allocations and frees of results and workspace in the order of
        `calls`, in which blocks numbered below `len(results)` are the results, the others workspace."""
        workspace: dict[int, int] = {}
        for allocates, block, nbytes in calls:
            if not allocates:
                self._freed(workspace[block])
            elif block < len(results):
                self.count(results[block])
            else:
                workspace[block] = self._allocated(nbytes)
        self.count(results)
        super().raise_peak(workspace_bytes)

    def _allocated(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        self.calls.append(BlockCall(True, len(self.sizes) - 1, nbytes))
        return len(self.sizes) - 1

    def _freed(self, number: int) -> None:
        self.calls.append(BlockCall(False, number, self.sizes[number]))


NOTABLE = 1024**2
"""Torch's caching allocator gives out blocks of fewer bytes from a pool of their own: they make no holes."""


@dataclass(frozen=True)
class OpDryRun:
    """Allocations and frees while an operator runs, and the most bytes that it holds at once besides its results."""

    calls: tuple[BlockCall, ...]
    """All calls but those of workspace blocks of at most `NOTABLE` bytes. Blocks are numbered from 0: first the
    results, by their position, then the workspace."""
    workspace_bytes: int


def dry_run_op(
    call: OpCall, kernel_bytes: Callable[[OpCall], int], block_bytes: int = 1, *, device: str = "cpu"
) -> OpDryRun | None:
    """A dry run of an operator that is written in Python (a composite of others); None for other operators. It runs on
    tensors without memory: fake ones if `device` is "cpu"; if it is "meta", meta ones, which stand for those of a card.
    Blocks are rounded up to multiples of `block_bytes`, as the allocator does. `kernel_bytes` gives the workspace of
    each call within the operator."""
    implementation = IMPLEMENTATIONS.get(call.op)
    if implementation is None:
        return None
    record = _Record(kernel_bytes, block_bytes)
    with plain_tensors(), torch.no_grad(), FakeTensorMode() if device == "cpu" else nullcontext():
        args, kwargs = call.make_arguments(device)
        with record:
            results = list(tensors_in(implementation(*args, **kwargs)))
        return record.seen_from_outside(results)


class _Record(BlockCalls):  # type: ignore[no-untyped-call]
    """Lists the allocator's calls of operators that run on tensors without memory, and of their kernels' workspaces."""

    def __init__(self, kernel_bytes: Callable[[OpCall], int], block_bytes: int) -> None:
        super().__init__(block_bytes=block_bytes)
        self.kernel_bytes, self.block_bytes = kernel_bytes, block_bytes

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes of the kernel's workspace, in whole blocks."""
        nbytes = self.kernel_bytes(describe(func, args, kwargs, result))
        return -(-nbytes // self.block_bytes) * self.block_bytes

    def seen_from_outside(self, results: Sequence[torch.Tensor]) -> OpDryRun:
        """The calls as those of one operator: the block of each of the `results` gets that result's position as its
        number, all others follow, and small workspace blocks (`NOTABLE`) are left out."""
        storages = [tensor.untyped_storage() for tensor in results]
        made = {self.number[storage]: at for at, storage in enumerate(storages) if storage in self.number}
        named = [(made.get(number, len(results) + number), makes, nbytes) for makes, number, nbytes in self.calls]
        shown = (BlockCall(makes, at, size) for at, makes, size in named if at < len(results) or size > NOTABLE)
        alive = accumulate(nbytes if makes else -nbytes for makes, _, nbytes in self.calls)
        return OpDryRun(tuple(shown), max(alive, default=0) - sum(self.sizes[number] for number in made))

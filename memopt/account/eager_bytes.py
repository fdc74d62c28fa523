"""The bytes that this process has allocated, and those that eager code allocates, counted while it runs; on the CPU
also without computing its results."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import torch

from memopt.compat.fakes import FakeTensor, FakeTensorMode
from memopt.compat.host import HOST, is_on_host, protected, uncomputed
from memopt.compat.operators import (
    makes_sparse_gradients,
    makes_unknown_bytes,
    plain_tensors,
    schema_of,
    tree_flatten,
    tree_unflatten,
)
from memopt.compat.tensors import sizes_within, special_kind, storages_of
from memopt.compat.true_results import correct_strides, may_differ
from memopt.device.devices import device_of
from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import OpCall, TensorSpec, describe, tensors_in
from memopt.device.workspace import (
    COLLECTIVES,
    eager_workspace_bytes,
    estimate_workspace,
    known_workspace_bytes,
    run_metered,
)
from memopt.device.workspace_rules import SCALARS


def allocated_bytes(device: torch.device) -> int | None:
    """The bytes that are allocated now: on CUDA by torch, on the CPU by `malloc` in the whole process, for any purpose.

    On CUDA they are the bytes requested. On the CPU only differences between two readings are of use, and a few kB of
    them are Python's own. None on other devices, and on the CPU without glibc 2.33 or later."""
    kind = device_of(device)
    if kind.caching:
        return kind.requested_bytes(device)
    if not kind.is_host or (read := _mallinfo2()) is None:
        return None
    info = read()
    return int(info.uordblks + info.hblkhd) or None  # 0 where another allocator stands in for that of glibc


def allocation_limit(device: torch.device) -> Callable[[], int | None]:
    """A function that returns an upper bound on the bytes that the tensors of this process hold now, 100 times faster
    than `allocated_bytes`; it returns None but on the CPU, and where `malloc` does not tell.

    At the first reading `malloc` tells how much it has allocated, and how much more it can allocate before it maps more
    memory. Each reading is the sum of both and of what the process has mapped since the first one. Shared memory, which
    `malloc` does not know, counts with its resident pages."""
    unmapped: int | None = None  # what `malloc` could allocate at the first reading, less what was mapped then

    def limit() -> int | None:
        nonlocal unmapped
        if device.type != HOST.type or (mapped := _mapped_bytes()) is None:
            return None
        if unmapped is None:
            info = read() if (read := _mallinfo2()) else None
            if info is None or not (allocatable := info.uordblks + info.hblkhd + info.fordblks):
                return None
            unmapped = allocatable - mapped[0]
        return unmapped + sum(mapped)

    return limit


def _mapped_bytes() -> tuple[int, int] | None:
    """The bytes mapped now: private and writable; and resident pages of files and shared memory. None: unknown."""
    try:
        pages = list(map(int, os.pread(_statm_descriptor(os.getpid()), 256, 0).split()))
        return pages[5] * mmap.PAGESIZE, pages[2] * mmap.PAGESIZE
    except (OSError, IndexError, ValueError):
        return None


@lru_cache(maxsize=1)
def _statm_descriptor(process: int) -> int:
    """A descriptor of `/proc/<pid>/statm`, kept open since opening takes three times as long; one for each process."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _mallinfo2() -> Any:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    read.restype = _Mallinfo2
    return read


_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""The tags of operators that return numbers, or tensors whose sizes depend on values."""


class ValueIsRead(Exception):
    """Raised where code on fake tensors depends on a value, or a kernel's bytes do not follow from its fake results."""


class EagerBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make on devices of the type `home`, in blocks as the allocator of
    `device_type` gives them out, and the workspace of that device's kernels.

    For use inside of a fake mode with `allow_non_fake_inputs`. Tensors of one element in the host's memory stay real:
    optimizers count their steps in them, and choose between branches by their values. With `stand_ins`, other values
    that are read as numbers are made up; without, reading one, or a random number, raises `ValueIsRead`. Where the peak
    exceeds `most_bytes`, `_TooManyBytes` is raised. After `most_calls` operators `ValueIsRead` is raised, since a loop
    may end only when a value allows it."""

    _on_fakes = True

    def __init__(
        self,
        device_type: str,
        home: str,
        *,
        stand_ins: bool = True,
        most_bytes: float = math.inf,
        most_calls: float = math.inf,
    ) -> None:
        super().__init__(block_bytes=device_of(device_type).block_bytes, device_type=home)
        self._stand_ins, self.most_bytes, self._calls_left = stand_ins, most_bytes, most_calls
        self.left_out = False
        """Whether a kernel ran that makes more bytes than its fake results have."""
        self.sparse_gradients = False
        """Whether an operator ran whose gradient is sparse, which fakes do not show."""
        self.kernels: set[str] = set()
        """The names of the operators that ran, as in "aten::add"."""
        self.calls: Counter[OpCall] = Counter()
        """How often each kernel ran. Calls that are not computed are described without their results."""
        self._kernels_of = device_type

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result: real for one element on the host, made up for a fake number, as the class says."""
        self.kernels.add(schema_of(func).name)
        self._calls_left -= 1
        if self._calls_left < 0:
            raise ValueIsRead("a loop in the code seems to end only when a tensor has a certain value")
        self.left_out |= makes_unknown_bytes(func)
        self.sparse_gradients |= makes_sparse_gradients(func, args)
        given = list(tensors_in((args, list(kwargs.values()))))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            if not self._stand_ins:
                raise ValueIsRead
            # A fake has no value: a number of its dtype.
            return 0.5 if given[0].dtype.is_floating_point else given[0].dtype == torch.bool or 1
        alone = func.namespace != "c10d"  # a collective on real values would wait for other ranks
        devices = (value.type for value in (*args, *kwargs.values()) if isinstance(value, torch.device))
        if given and alone and all(map(_is_real_number, given)) and all(kind == HOST.type for kind in devices):
            return _run_real(func, args, kwargs)
        result = func(*args, **kwargs)
        made = list(tensors_in(result))
        if not self._stand_ins and torch.Tag.nondeterministic_seeded in func.tags:
            return result
        if not given and made and all(tensor.numel() == 1 and is_on_host(tensor) for tensor in made):
            return _run_real(func, args, kwargs)
        return result

    def exclude(self, tensors: Any) -> None:
        """Leave these tensors out of the count, unless they are counted already. Among fakes, real ones cannot be: they
        count where the code or the fakes copy them."""
        given = tensors_in(tensors)
        super().exclude([one for one in given if isinstance(one, FakeTensor)] if self._on_fakes else tensors)

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes of the operator's workspace: a rule's upper bound, or on the CPU measured if it were the peak."""
        if next(tensors_in(result), None) is None:
            return 0
        tensors = list(tensors_in((result, args, list(kwargs.values()))))
        if any(map(special_kind, tensors)):  # no rule is known: kernels convert such operands, and copy others
            copied = [one for one in tensors if special_kind(one) or not one.is_contiguous()]
            return sum({storage: storage.nbytes() for tensor in copied for storage in storages_of(tensor)}.values())
        call = describe(func, args, kwargs, result)
        self.calls[call] += 1
        return self.eager_workspace(call)

    def eager_workspace(self, call: OpCall) -> int:
        """The bytes that a kernel allocates for itself and frees before it returns, found as `workspace_bytes` says."""
        return eager_workspace_bytes(call, self._kernels_of, self.peak_bytes - self.live_bytes)

    def raise_peak(self, workspace_bytes: int) -> None:
        """Raise the peak to the bytes alive now plus `workspace_bytes`. Raises `_TooManyBytes` beyond `most_bytes`."""
        super().raise_peak(workspace_bytes)
        if self.peak_bytes > self.most_bytes:
            raise _TooManyBytes


class RealBytes(EagerBytes):  # type: ignore[no-untyped-call]
    """Counts as `EagerBytes` does while operators run on real tensors. An operator whose results and workspace would
    exceed `most_bytes` does not run.

    Kernels whose workspace has to be measured run once more in `measure`, when the tensors of the step are freed.
    `WorkspaceUnknown` is raised where that measurement decides whether an operator may run."""

    _on_fakes = False

    def __init__(self, device_type: str, home: str, most_bytes: float) -> None:
        super().__init__(device_type, home, most_bytes=most_bytes)
        self._unmeasured: dict[OpCall, int] = {}
        """The calls that are left to `measure`, with the most bytes that were alive while they ran."""
        self._runs: dict[OpCall, tuple[int, OpCall | None]] = {}
        """By a call without its results: the bytes of its results, and the call with them (None where unknown)."""
        self._metered: int | None = None
        """The workspace bytes of the operator that has just run, where they were metered."""
        self.depends_on_values = False
        """Whether an operator ran that returns a value to the code, or whose result's bytes may depend on values."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the real tensors, and return its result. Raises `_TooManyBytes`, `WorkspaceUnknown`."""
        made, call = self._expected(func, args, kwargs)
        room = self.most_bytes - self.live_bytes - made
        if room < 0:
            raise _TooManyBytes
        if call is not None and estimate_workspace(call, self._kernels_of) > max(SCALARS, room):
            if (workspace := known_workspace_bytes(call, self._kernels_of)) is None:
                raise WorkspaceUnknown(call)
            if workspace > room:
                raise _TooManyBytes
        result = self._run(func, args, kwargs)
        known = func is _FROM_PARTS or _sizes_of_special(result) <= _sizes_of_special((args, list(kwargs.values())))
        self.depends_on_values |= makes_unknown_bytes(func) or not (known and _BY_VALUES.isdisjoint(func.tags))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, metered if its tensors on the CPU are sparse, nested or quantised, as no rule knows it."""
        special = any(map(special_kind, tensors_in((args, list(kwargs.values())))))
        if not special or schema_of(func).is_mutable or not device_of(self._kernels_of).is_host:
            return LiveBytes.run(self, func, args, kwargs)
        result, self._metered = run_metered(func, args, kwargs)
        return result

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """As `EagerBytes` finds them, but as measured while the operator ran; 0 if `measure` will find them later."""
        metered, self._metered = self._metered, None
        return super().workspace_bytes(func, args, kwargs, result) if metered is None else metered

    def note_read(self) -> None:
        """Record that the code reads a value of a tensor other than by an operator."""
        self.depends_on_values = True

    def _expected(self, func: Any, args: Any, kwargs: Any) -> tuple[int, OpCall | None]:
        """The bytes of an operator's results as far as known before it runs, and its call (None: not known)."""
        given = tensors_in((args, list(kwargs.values())))
        if func.is_view or func.namespace in COLLECTIVES or any(map(special_kind, given)):
            return 0, None
        call = describe(func, args, kwargs, ())
        if call not in self._runs:
            try:
                self._runs[call] = call.run_on_meta()
            except Exception:  # its sizes depend on values, or it cannot run on "meta"
                self._runs[call] = 0, None
        return self._runs[call]

    def eager_workspace(self, call: OpCall) -> int:
        """An upper bound from a rule on the workspace of the kernel of `call`, in bytes. On the CPU, where that bound
        would raise the peak, the measured bytes, or 0 where the kernel is to be measured later, by `measure`."""
        bound = estimate_workspace(call, self._kernels_of)
        if self.live_bytes + bound <= self.peak_bytes:
            return bound
        if (known := known_workspace_bytes(call, self._kernels_of)) is not None:
            return known
        self._unmeasured[call] = max(self.live_bytes, self._unmeasured.get(call, 0))
        return 0

    def measure(self) -> None:
        """Run the kernels that `eager_workspace` left out, and raise the peak. Raises `_TooManyBytes`."""
        for call, live_bytes in self._unmeasured.items():
            self.live_bytes = live_bytes
            self.raise_peak(eager_workspace_bytes(call, self._kernels_of, self.peak_bytes - live_bytes))


class MetaBytes(EagerBytes):  # type: ignore[no-untyped-call]
    """Counts tensors on "meta" as `EagerBytes` counts fakes of the CPU, but faster; for code that reads no device."""

    _on_fakes = False

    def __init__(self) -> None:
        super().__init__(HOST.type, "meta")
        self._device_type = None  # numbers in the host's memory count too

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator's result; an elementwise one in place, without effect on "meta", returns its argument."""
        in_place = torch.Tag.pointwise in func.tags and schema_of(func).name.endswith("_")
        if in_place and args[0].is_meta:
            self.kernels.add(schema_of(func).name)
            return args[0]
        return super().run(func, args, kwargs)


_FROM_PARTS = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
"""Makes a sparse tensor of given indices and values, such as the gradient of an embedding with `sparse=True`."""


class _TooManyBytes(Exception):
    """Raised where operators hold more than `most_bytes`, by the upper bounds of their kernels' workspaces."""


class WorkspaceUnknown(Exception):
    """Raised with an `OpCall` whose workspace, not measured yet, decides whether the operator may run."""


class TensorsTooLarge(_TooManyBytes):
    """Raised where tensors alone, without any workspace, exceed the most bytes that a step may hold."""


def _sizes_of_special(values: Any) -> set[tuple[int, ...]]:
    """The sizes within each sparse, nested or quantised tensor among values, in any order."""
    return {tuple(sorted(sizes_within(one))) for one in tensors_in(values) if special_kind(one)}


def _is_real_number(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.numel() == 1 and is_on_host(tensor)


def _run_real(func: Any, args: Any, kwargs: Any) -> Any:
    with plain_tensors():
        return func(*args, **kwargs)


_COMPUTED_BYTES = 1024**2
"""Integer tensors and masks of up to this size are computed, if they depend on such tensors alone."""


class UncomputedBytes(EagerBytes):  # type: ignore[no-untyped-call]
    """Counts as `EagerBytes` does on fake tensors of the CPU, but much faster: operators do not run. Their results are
    tensors without memory, with the layouts that they have on "meta". Equal calls of an operator are examined once.

    Small integer tensors and masks are computed, as code often tests whether a mask is all true; `reads` tells whether
    a value was read. Reading other values raises `ValueIsRead`; an operator whose result sizes depend on values raises
    an error of its own. Existing tensors are not written to."""

    _on_fakes = False

    def __init__(self, most_bytes: float) -> None:
        super().__init__(HOST.type, HOST.type, stand_ins=False, most_bytes=most_bytes)
        self.reads = False
        self._kernels: dict[OpCall, _Kernel] = {}
        self._workspace_bytes = 0
        """The workspace of the latest operator."""
        self._uncomputed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf tensor of the same layout that is not counted: a copy of a small integer one, else without memory."""
        if _is_known_kind(tensor):
            return protected(torch.zeros_like(tensor, device=HOST) if tensor.is_meta else tensor.clone())
        return self._new(TensorSpec(tensor.shape, tensor.stride(), tensor.dtype)).requires_grad_(tensor.requires_grad)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator's result, computed only as the class says. Raises `ValueIsRead` where it would read values that
        are not computed, or its kernel allocates bytes that do not follow from its results, and `TensorsTooLarge` where
        tensors alone would exceed `most_bytes`."""
        self._workspace_bytes = 0
        if makes_unknown_bytes(func):
            raise ValueIsRead
        given = list(tensors_in((args, list(kwargs.values()))))
        if torch.Tag.data_dependent_output in func.tags:
            if any(tensor.untyped_storage() in self._uncomputed for tensor in given):
                raise ValueIsRead
            self.reads = True
            return func(*args, **kwargs)
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        call = describe(func, args, kwargs, ())
        if call not in self._kernels:
            self._kernels[call] = _Kernel.of(call, *self._results_of(call))
        kernel = self._kernels[call]
        if kernel.is_view:
            return func(*args, **kwargs)
        self.calls[call] += 1
        if self.live_bytes + kernel.made_bytes > self.most_bytes:
            raise TensorsTooLarge
        self._workspace_bytes = kernel.workspace_bytes
        if kernel.may_be_known and all(map(self._is_known, given)):
            result = func(*args, **kwargs)
            for tensor in tensors_in(result):
                protected(tensor)
            return result
        for position in kernel.written:
            self._uncomputed.add(given[position].untyped_storage())
        return tree_unflatten([self._result(leaf, given) for leaf in kernel.results], kernel.structure)

    def workspace_bytes(self, func: Any, args: Any, kwargs: Any, result: Any) -> int:
        """An upper bound on the workspace of the kernel that `run` was last called for; the arguments are not used."""
        return self._workspace_bytes

    def _results_of(self, call: OpCall) -> tuple[Any, Any, Any]:
        """A call's arguments and results on "meta", or as fakes with true strides where those on "meta" may differ."""
        args, kwargs = call.make_arguments("meta")
        with plain_tensors(), torch.no_grad():
            if not may_differ(call.op, tensors_in((args, list(kwargs.values())))):
                return args, kwargs, call.op(*args, **kwargs)
            with self._fakes:
                args, kwargs = call.make_arguments(HOST.type)
                return args, kwargs, call.op(*args, **kwargs)

    @cached_property
    def _fakes(self) -> FakeTensorMode:
        mode = FakeTensorMode()
        correct_strides(mode)
        return mode

    def _result(self, leaf: Any, given: Sequence[torch.Tensor]) -> Any:
        if isinstance(leaf, _Given):
            return given[leaf.position]
        return self._new(leaf) if isinstance(leaf, TensorSpec) else leaf

    def _new(self, spec: TensorSpec) -> torch.Tensor:
        made = uncomputed(spec.size, spec.stride, spec.dtype)
        self._uncomputed.add(made.untyped_storage())
        return made

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _is_known_kind(tensor) and tensor.untyped_storage() not in self._uncomputed


@dataclass(frozen=True)
class _Given:
    """A result of an operator that is one of its arguments: the one at `position` among the tensor arguments."""

    position: int


@dataclass(frozen=True)
class _Kernel:
    """The results and costs of an operator for arguments of given layouts."""

    results: tuple[Any, ...]
    """Its results as leaves: `TensorSpec` for a new tensor, `_Given` for an argument, or what is no tensor."""
    structure: Any
    """The nesting of the leaves, for `tree_unflatten`."""
    written: tuple[int, ...]
    """The positions of the tensors among the arguments that it writes to."""
    is_view: bool
    """Whether a result lies in an argument's memory without being the argument."""
    may_be_known: bool
    """Whether its results are small tensors of integers or masks that depend on the arguments alone."""
    made_bytes: int
    workspace_bytes: int
    """An upper bound of what the kernel takes for itself."""

    @classmethod
    def of(cls, call: OpCall, args: Any, kwargs: Any, found: Any) -> _Kernel:
        """The kernel of `call`, with its arguments without memory (`args`, `kwargs`) and its results (`found`)."""
        given = list(tensors_in((args, list(kwargs.values()))))
        leaves, structure = tree_flatten(found)
        positions = {id(tensor): _Given(position) for position, tensor in enumerate(given)}
        own = {tensor.untyped_storage() for tensor in given}
        new = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and id(leaf) not in positions]
        written = _written(call, args, kwargs)
        seeded = torch.Tag.nondeterministic_seeded in call.op.tags
        return cls(
            tuple(positions.get(id(leaf)) or _spec(leaf) for leaf in leaves),
            structure,
            tuple(positions[id(tensor)].position for tensor in written),
            any(tensor.untyped_storage() in own for tensor in new),
            not (written or seeded) and all(map(_is_known_kind, new)),
            sum(tensor.untyped_storage().nbytes() for tensor in new),
            estimate_workspace(describe(call.op, args, kwargs, found), HOST.type),
        )


def _written(call: OpCall, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call that its operator writes to."""
    arguments = schema_of(call.op).arguments
    named = {**dict(zip([argument.name for argument in arguments], args, strict=False)), **kwargs}
    changed = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return list(tensors_in([named.get(name) for name in changed]))


def _spec(leaf: Any) -> Any:
    return TensorSpec(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _is_known_kind(tensor: torch.Tensor) -> bool:
    """Whether a tensor is small and holds integers or truth values."""
    numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return not numbers and tensor.numel() * tensor.element_size() <= _COMPUTED_BYTES

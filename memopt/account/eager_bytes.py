"""The bytes that this process has allocated, and those that eager code allocates, counted while it runs."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections import Counter
from functools import cache, lru_cache
from typing import Any

import torch

from memopt.compat.fakes import FakeTensor
from memopt.compat.host import HOST, is_on_host
from memopt.compat.operators import makes_unknown_bytes, plain_tensors, schema_of
from memopt.compat.tensors import sizes_within, special_kind, storages_of
from memopt.device.devices import device_of
from memopt.device.live_bytes import LiveBytes
from memopt.device.op_call import OpCall, describe, tensors_in
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


class AllocationLimit:
    """An upper bound on the bytes that the tensors of this process hold, read 100 times faster than `allocated_bytes`.

    At the first reading `malloc` tells how much it has allocated, and how much more it can allocate before it maps more
    memory. Each reading is the sum of both and of what the process has mapped since the first one. Shared memory, which
    `malloc` does not know, counts with its resident pages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unmapped: int | None = None
        """The bytes that `malloc` could allocate at the first reading, less those that were mapped then."""

    def bytes(self) -> int | None:
        """An upper bound on the bytes allocated now; None but on the CPU, and where `malloc` does not tell."""
        if self._device.type != HOST.type or (mapped := _mapped_bytes()) is None:
            return None
        if self._unmapped is None:
            info = read() if (read := _mallinfo2()) else None
            if info is None or not (allocatable := info.uordblks + info.hblkhd + info.fordblks):
                return None
            self._unmapped = allocatable - mapped[0]
        return self._unmapped + sum(mapped)


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
        known = _sizes_of_special(result) <= _sizes_of_special((args, list(kwargs.values())))
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

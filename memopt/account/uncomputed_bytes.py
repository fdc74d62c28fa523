"""Counts what operators hold on the CPU without computing their results."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from memopt.account.eager_bytes import EagerBytes, TensorsTooLarge, ValueIsRead
from memopt.compat.fakes import FakeTensorMode
from memopt.compat.host import HOST, protected, uncomputed
from memopt.compat.operators import makes_unknown_bytes, plain_tensors, schema_of, tree_flatten, tree_unflatten
from memopt.compat.true_results import correct_strides, may_differ
from memopt.device.op_call import OpCall, TensorSpec, describe, tensors_in
from memopt.device.workspace import estimate_workspace

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

"""An operator call without values: the operator, and shapes, strides and dtypes of its tensors. Equal calls cost the
same, so a call is the key of a kernel's price. Torch's flop counter has formulas for its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from memopt.compat.host import HOST
from memopt.compat.operators import OpOverload, plain_tensors, schema_of
from memopt.compat.symbols import is_symbolic, upper_bound

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class TensorSpec:
    """The properties of a tensor that a kernel's memory may depend on, with upper bounds of data-dependent sizes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def dense_bytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.numel * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes from its first to its last element: fewer than `dense_bytes` if it is expanded, more if it has gaps."""
        if not self.numel:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        return fills(zip(reversed(self.stride), reversed(self.size), strict=True))

    @property
    def dense(self) -> bool:
        """Whether the tensor's elements fill one contiguous range of memory, in any order of the dimensions."""
        return fills(sorted(zip(self.stride, self.size, strict=True)))

    def make(self, device: str) -> torch.Tensor:
        """A tensor of this size, stride and dtype, with values that any op accepts: True in masks, so that they select
        as many elements as possible, 0 in integers, which is a valid index, and 0.5 in all others."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)
        if self.dtype == torch.bool:
            return tensor.fill_(True)
        return tensor.fill_(0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0)


def fills(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether in pairs of a stride and a size each stride is the product of the sizes before it, as in a tensor without
    gaps; dimensions of size 1 have any stride."""
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class OpCall:
    """An operator, its arguments and its results, with `TensorSpec` in the place of tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: Any

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload, `add` for `aten.add.Tensor`."""
        return str(schema_of(self.op).name.split("::")[-1])

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_found_in((self.args, self.kwargs), TensorSpec))

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return tuple(_found_in(self.results, TensorSpec))

    def argument(self, position: int, name: str = "") -> Any:
        """The argument at this position, or the keyword of this name; None where neither is given."""
        return self.args[position] if position < len(self.args) else dict(self.kwargs).get(name)

    def make_arguments(self, device: str) -> tuple[list[Any], dict[str, Any]]:
        """Arguments with made-up values on `device` ("cpu", "cuda", "meta"), to run the operator on. On "meta",
        `device` arguments of the call are replaced too, so that its results are on "meta"."""
        args, kwargs = _make(self.args, device), {name: _make(value, device) for name, value in self.kwargs}
        declared = schema_of(self.op).arguments
        if device == "meta" and any(argument.name == "device" and argument.kwarg_only for argument in declared):
            kwargs["device"] = torch.device(device)
        for argument, value in zip(declared, args, strict=False):
            # The ends of groups of rows: with zeros a grouped matmul would have nothing to compute.
            if argument.name == "offs" and isinstance(value, torch.Tensor) and device == HOST.type:
                value.copy_(torch.linspace(0, args[0].shape[0], len(value) + 1)[1:])
        return args, kwargs

    def run_on_meta(self) -> tuple[int, OpCall]:
        """The bytes of storages that a run on "meta" makes for its results, and the call with them; or its error."""
        args, kwargs = self.make_arguments("meta")
        with plain_tensors(), torch.no_grad():
            found = self.op(*args, **kwargs)
        own = {tensor.untyped_storage() for tensor in tensors_in((args, list(kwargs.values())))}
        made = {tensor.untyped_storage() for tensor in tensors_in(found)} - own
        return sum(storage.nbytes() for storage in made), replace(self, results=_freeze(found))

    def make_results(self, device: str) -> Any:
        """Results of the same shapes on `device`, with made-up values."""
        return _make(self.results, device)


def op_call(node: fx.Node) -> OpCall | None:
    """The call of a node; None where no kernel runs: Python operators, higher-order ops, arithmetic on sizes. Raises
    `CaptureError` for a size that depends on data and has no bound."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    if next(tensors_in(node.meta.get("val")), None) is None:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return describe(node.target, args, kwargs, node.meta["val"])


def describe(op: OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any], results: Any) -> OpCall:
    """The call of an operator with these arguments (real, fake or meta tensors) and results."""
    kinds = {argument.name: str(argument.type) for argument in schema_of(op).arguments}
    given = tuple(_freeze_argument(value, kind) for value, kind in zip(args, kinds.values(), strict=False))
    named = tuple((name, _freeze_argument(value, kinds[name])) for name, value in kwargs.items())
    return OpCall(op, given, named, _freeze(results))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples and lists."""
    return _found_in(value, torch.Tensor)


def _found_in(value: Any, kind: type[_Kind]) -> Iterator[_Kind]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _found_in(element, kind)


def _freeze_argument(value: Any, kind: str) -> Any:
    """An argument as an `OpCall` has it; `kind` is its type in the operator's schema. A symbol where the schema has a
    number (a factor or a summand, not a size) counts as 1."""
    return 1 if kind.startswith("number") and is_symbolic(value) else _freeze(value)


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(map(_number, value.shape)), tuple(map(_number, value.stride())), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(_freeze(element) for element in value)
    return _number(value)


def _number(value: Any) -> Any:
    """A symbol's upper bound; 1 for a float or a truth value that depends on data, since no bytes depend on it."""
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return 1.0 if isinstance(value, torch.SymFloat) else True
    return upper_bound(value) if isinstance(value, torch.SymInt) else value


def _make(value: Any, device: str) -> Any:
    if isinstance(value, TensorSpec):
        return value.make(device)
    return [_make(element, device) for element in value] if isinstance(value, tuple) else value


_NOT_IN_FORMULAS = ("out", "out_dtype")
"""Arguments that formulas do not get: given by position, they would take a result's dtype for its shape."""


def flop_formula(op: Any) -> Callable[..., Any] | None:
    """A function of the arguments of a call of `op`, and of its result as `out_val`, that gives its floating-point
    operations, two for a multiply-add, symbolic for symbolic sizes; None for an operator without a formula."""
    formula = flop_registry.get(op.overloadpacket) if isinstance(op, OpOverload) else None
    if formula is None:
        return None
    declared = schema_of(op).arguments

    def operations(*args: Any, out_val: Any, **kwargs: Any) -> Any:
        given = zip(args, declared, strict=False)
        shapes = [value for value, argument in given if argument.name not in _NOT_IN_FORMULAS]
        named = {name: value for name, value in kwargs.items() if name not in _NOT_IN_FORMULAS}
        return formula(*shapes, **named, out_val=out_val)

    return operations

"""Sizes that the user declares to change between batches, in the conventions of `torch.export`'s `dynamic_shapes`."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.capture.inputs import Call, replaced_tensors, tensor_numbers, tensors_in
from memopt.compat.dynamo import marked_changing

Place: TypeAlias = tuple[int, int]
"""The number of a tensor in `tensors_in(call)`, and one of its dimensions."""


def declared_sizes(dynamic: Any, call: Call, model: nn.Module, *, with_targets: bool) -> dict[Place, int | None]:
    """The places of a call whose sizes change, each with the largest size if it has one.

    Args:
        dynamic: nested like the batch (a dict by the forward's argument names, or a tuple), with `{dimension: Dim}` or
            a sequence of one `Dim` per dimension for a tensor, None for what does not change. A `Dim` is
            `torch.export.Dim("length", max=2048)`, `Dim.AUTO` or `Dim.DYNAMIC`; None, `Dim.STATIC` and numbers are
            sizes that do not change.
        with_targets: the call is `(inputs, targets)`, as with a `loss_fn`.

    Raises `ValueError` for a name, a dimension or a value that does not fit the batch.
    """
    if dynamic is None:
        return {}
    numbers = tensor_numbers(call)
    given: Any = call[0]
    if not with_targets:
        given = _by_name(call, model) if isinstance(dynamic, Mapping) else call[0]
    return {
        (numbers[id(tensor)], dimension): most
        for tensor, dimensions in _matched(dynamic, given, "dynamic")
        for dimension, most in dimensions.items()
    }


def all_places(call: Call) -> set[Place]:
    """The places of all sizes of a call."""
    return {(number, dim) for number, tensor in enumerate(tensors_in(call)) for dim in range(tensor.dim())}


def markable(call: Call, places: Collection[Place]) -> set[Place]:
    """Those of the places whose sizes can become symbols: not sizes of 0 and 1, which torch takes as constants."""
    tensors = list(tensors_in(call))
    return {(number, dimension) for number, dimension in places if tensors[number].shape[dimension] > 1}


def marked(call: Call, places: Collection[Place]) -> AbstractContextManager[None]:
    """A context in which Dynamo, where it captures such a call, makes symbols of these sizes."""
    tensors = list(tensors_in(call))
    return marked_changing([(tensors[number], dimension) for number, dimension in places])


def at_largest(call: Call, places: Mapping[Place, int | None]) -> Call:
    """The call with "meta" tensors of the largest declared sizes in place of its own; the call itself without any."""
    if not any(places.values()):
        return call
    numbers = tensor_numbers(call)

    def largest(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        for (number, dimension), most in places.items():
            if number == numbers[id(tensor)] and most is not None:
                shape[dimension] = most
        return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

    return replaced_tensors(call, largest)


def _by_name(call: Call, model: nn.Module) -> dict[str, Any]:
    """The arguments of a call by the names that the model's forward has for them."""
    names = list(inspect.signature(model.forward).parameters)
    return {**dict(zip(names, call[0], strict=False)), **call[1]}


def _matched(dynamic: Any, given: Any, path: str) -> Iterator[tuple[torch.Tensor, dict[int, int | None]]]:
    """The tensors that have changing sizes: their dimensions, and the largest size of each."""
    if dynamic is None:
        return
    if isinstance(given, torch.Tensor):
        yield given, _dimensions(dynamic, given, path)
    elif isinstance(given, Mapping) and isinstance(dynamic, Mapping):
        for name, inner in dynamic.items():
            if name not in given:
                raise ValueError(
                    f"{path} names {name!r}, which the batch has not; it has {', '.join(map(repr, given))}"
                )
            yield from _matched(inner, given[name], f"{path}[{name!r}]")
    elif isinstance(given, Sequence) and isinstance(dynamic, Sequence) and len(dynamic) <= len(given):
        for number, inner in enumerate(dynamic):
            yield from _matched(inner, given[number], f"{path}[{number}]")
    else:
        raise ValueError(
            f"{path} must be nested like the batch, such as {{'input_ids': {{1: Dim('length', max=2048)}}}}, "
            f"not {dynamic!r}"
        )


def _dimensions(dynamic: Any, tensor: torch.Tensor, path: str) -> dict[int, int | None]:
    """The changing dimensions of one tensor, with the largest size of each if it has one."""
    sizes = dynamic.items() if isinstance(dynamic, Mapping) else enumerate(dynamic)
    found: dict[int, int | None] = {}
    for dimension, dim in sizes:
        if not isinstance(dimension, int) or not -tensor.dim() <= dimension < tensor.dim():
            raise ValueError(f"{path} names dimension {dimension!r} of a tensor of shape {tuple(tensor.shape)}")
        place = dimension % tensor.dim()
        if dim is None or isinstance(dim, int) or dim == torch.export.Dim.STATIC:
            continue
        most = getattr(dim, "max", None)
        found[place] = int(most) if most is not None and most < 2**60 else None
        if found[place] is not None and tensor.shape[place] > found[place]:  # type: ignore[operator]
            raise ValueError(f"{path}[{dimension}] is at most {found[place]}, but the batch has {tensor.shape[place]}")
    return found

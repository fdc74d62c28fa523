"""Small tensors that are laid out like an operator's operands, on which the operator can be tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.compat.pytree import tree_leaves, tree_map

_SMALL = 4
"""Sizes up to this one are kept."""


class SmallOperands:
    """The arguments of a call with small sizes in place of large ones, equal ones for equal ones.

    No size of the call may be symbolic.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._arguments = args, kwargs
        sizes = {size for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) for size in leaf.shape}
        large = sorted(size for size in sizes if size > _SMALL)
        self._numbers = {size: _SMALL + 1 + rank for rank, size in enumerate(large)}

    def made(self, make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments; `make` makes an operand from a tensor on "meta" that is laid out so."""

        def small(leaf: Any) -> Any:
            return make(_small_like(leaf, self._numbers)) if isinstance(leaf, torch.Tensor) else leaf

        positional, named = tree_map(small, self._arguments)
        return [_small_sizes(argument, self._numbers) for argument in positional], named


def order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the outermost to the innermost in memory."""
    strides: tuple[int, ...] = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _small_like(tensor: torch.Tensor, numbers: dict[int, int]) -> torch.Tensor:
    """A tensor on "meta" with fewer elements and its dimensions in the same order; expanded ones stay so."""
    strides = [0] * tensor.dim()
    step = 1
    for dim in reversed(order(tensor)):
        if tensor.stride(dim) > 0:
            strides[dim] = step
            step *= numbers.get(tensor.shape[dim], tensor.shape[dim])
    shape = [numbers.get(size, size) for size in tensor.shape]
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")


def _small_sizes(argument: Any, numbers: dict[int, int]) -> Any:
    """An argument with its sizes replaced where it is a list of numbers."""
    if isinstance(argument, (list, tuple)):
        return type(argument)(numbers.get(entry, entry) if type(entry) is int else entry for entry in argument)
    return argument

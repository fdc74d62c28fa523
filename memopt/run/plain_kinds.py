"""The kinds of calls whose plain steps have their bytes counted. Calls of one kind differ in sizes only."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from memopt.capture.dynamic_shapes import at_largest
from memopt.capture.inputs import Call, tensors_in
from memopt.compat.operators import tree_flatten
from memopt.compat.tensors import sizes_within, special_kind
from memopt.run.plain_counter import CountedStep

GROWTHS = (2.0, 1.25)
"""Sizes above all counted ones are counted at one of these multiples, so that growing lengths are not counted one by
one: the first with which the step is likely to fit."""
_MOST_COUNTS = 12
"""The number of sizes that are counted of one kind of call; beyond it, sizes that no count covers are planned."""
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_LEAVES = (torch.Tensor, *_PLAIN)
Sizes: TypeAlias = tuple[int, ...]


@dataclass
class Kind:
    """The counted bytes of the plain steps of one kind of call: calls that differ in their sizes only."""

    fitting: list[tuple[Sizes, CountedStep]] = field(default_factory=list)
    too_large: list[Sizes] = field(default_factory=list)
    beside: int = 0
    """The most bytes outside of the step while such a call was run on values to be counted; 0 where none was."""

    def a_plan_will_do(self, sizes: Sizes, *, plans_serve_all: bool) -> bool:
        """Whether a call of these sizes is planned at once, instead of counting the bytes of its plain step first; no
        earlier count covers the sizes. It is if the steps of enough sizes have been counted. It also is if the plain
        step of a call like it exceeded the budget, and `plans_serve_all`: a captured graph serves calls of all sizes,
        so that planning takes less time than counting."""
        enough = len(self.fitting) + len(self.too_large) >= _MOST_COUNTS
        return enough or (plans_serve_all and any(_constants(sizes) == _constants(large) for large in self.too_large))

    def growth(self, sizes: Sizes) -> float:
        """The margin by which `sizes`, some of them above those of the latest count, are multiplied before they are
        counted. It is the first of `GROWTHS` with which the step fits the budget if its bytes grow with the square of
        the sizes; if none, the last one."""
        most, latest = self.fitting[-1]
        ratio = max(size / max(1, limit) for size, limit in zip(sizes, most, strict=True))
        for growth in GROWTHS[:-1]:
            if latest.step.held_bytes * ((growth * ratio) ** 2 - 1) <= latest.room_bytes:
                return growth
        return GROWTHS[-1]


def _constants(sizes: Sizes) -> Sizes:
    """The sizes that stay constants in a captured graph (0 and 1), with -1 in place of the others."""
    return tuple([size if size < 2 else -1 for size in sizes])


def kind_of_inputs(call: Call) -> tuple[Hashable, list[torch.Tensor]]:
    """A key of a call's arguments without the sizes of tensors, and the tensors among them. The key is None where an
    argument is an object, which may hold tensors that a count does not see."""
    leaves, structure = _leaves(call)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    known = all(isinstance(leaf, _PLAIN) for leaf in others)
    return (structure, repr(others), tuple(map(_without_sizes, tensors))) if known else None, tensors


def _leaves(call: Call) -> tuple[Sequence[Any], Hashable]:
    """The leaves of the arguments, and a key of the containers around them; quick for calls without containers."""
    leaves = (*call[0], *call[1].values())
    if all(isinstance(leaf, _LEAVES) for leaf in leaves):
        return leaves, (len(call[0]), *call[1])
    nested, structure = tree_flatten(call)
    return nested, repr(structure)


def _without_sizes(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.device, tensor.dim(), tensor.requires_grad, special_kind(tensor)


def sizes_of(tensors: Iterable[torch.Tensor]) -> Sizes:
    """The sizes of tensors, of sparse and nested ones those of the tensors inside."""
    return tuple([size for tensor in tensors for size in sizes_within(tensor)])


def grown(call: Call, kind: Kind) -> Iterator[Call]:
    """Yields one enlarged call to be counted, so that the count serves other calls too. A size of `call` that exceeds
    that of the latest count is multiplied by a margin (`Kind.growth`); the others become those of the latest count.
    Yields nothing before the first count."""
    if not kind.fitting:
        return
    tensors = list(tensors_in(call))
    sizes = sizes_of(tensors)
    growth = kind.growth(sizes)
    places = [(number, dim) for number, tensor in enumerate(tensors) for dim in range(tensor.dim())]
    counted = kind.fitting[-1][0]
    grown = [math.ceil(growth * size) if size > most else most for size, most in zip(sizes, counted, strict=True)]
    yield at_largest(call, dict(zip(places, grown, strict=True)))

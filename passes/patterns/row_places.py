"""Where the rows of a segment lie in tensors, and how views and broadcasting move them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.fx import Node

from passes.compat import statically_known_true
from passes.graphs.node_facts import same_sizes, tensors
from passes.graphs.op_kinds import op_name

RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})
_SIZED = RESHAPES - {"flatten"} | {"expand"}


@dataclass(frozen=True, eq=False)
class RowsPlace:
    """Where a tensor has its rows: in the dimension `dim`, whose size is `outer` · rows · `inner`, since a view may
    have merged dimensions on either side into it. The sizes may be symbols."""

    dim: int
    outer: Any = 1
    inner: Any = 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowsPlace) and same_sizes(
            (self.dim, self.outer, self.inner), (other.dim, other.outer, other.inner)
        )

    def __hash__(self) -> int:
        return hash(self.dim)


def with_rows(node: Node, place: RowsPlace, resize: Callable[[Any, RowsPlace], Any]) -> tuple[Any, ...]:
    """Returns the arguments of the call `node` with the sizes among them changed to another number of rows.

    `place` is where the call's result has the rows. `resize`, called with the size of that dimension and `place`,
    returns the new size."""
    if op_name(node) not in _SIZED:
        return node.args
    sizes: Any = node.args[-1] if op_name(node) == "unflatten" else node.args[1]
    number = place.dim
    if op_name(node) == "unflatten":
        number -= int(node.args[1]) % len(shape_of(node.args[0]))  # type: ignore[arg-type]
    if not 0 <= number < len(sizes) or _is_inferred(sizes[number]):
        return node.args
    changed = [*sizes[:number], resize(sizes[number], place), *sizes[number + 1 :]]
    return tuple(changed if argument is sizes else argument for argument in node.args)


def _is_inferred(size: Any) -> bool:
    return isinstance(size, int) and size == -1


def shape_of(node: Any) -> tuple[Any, ...]:
    """Returns the shape of a node's `meta["val"]`, or of the first tensor in it."""
    return tuple(next(tensors(node.meta["val"])).shape)


def moved_place(before: tuple[Any, ...], after: tuple[Any, ...], place: RowsPlace) -> RowsPlace | None:
    """Returns the place of the rows once a tensor of shape `before` is viewed as `after`; None where the view splits
    the rows, or where that is not known for all values of symbols."""
    rows = _quotient(before[place.dim], place.outer * place.inner)
    outer, inner = prod(before[: place.dim]) * place.outer, place.inner * prod(before[place.dim + 1 :])
    for dim, size in enumerate(after):
        left, right = _quotient(outer, prod(after[:dim])), _quotient(inner, prod(after[dim + 1 :]))
        if None not in (rows, left, right) and statically_known_true(size == left * rows * right):
            return RowsPlace(dim, left, right)
    return None


def _quotient(size: Any, by: Any) -> Any:
    """Returns a size divided by another one; None where a remainder may be left."""
    if isinstance(by, int) and not by:
        return None
    quotient = size // by
    return quotient if statically_known_true(quotient * by == size) else None


def aligned_place(node: Node, source: Node, place: RowsPlace) -> RowsPlace | None:
    """Returns the place of the rows in `source`, an operand that is broadcast to the result of `node`. `place` is where
    the result has the rows. None where the operand lacks that dimension or has size 1 in it: one row for all."""
    shape = shape_of(source)
    dim = place.dim - (len(shape_of(node)) - len(shape))
    return None if dim < 0 or statically_known_true(shape[dim] == 1) else replace(place, dim=dim)

"""How operators treat the rows of a dimension: which of them compute each row of their result from the same row of
their operands, so that they may run on a part of the rows at a time; and where the rows lie (`RowsPlace`).

An operator that is not known here mixes rows. So does one that draws random numbers or writes to an operand, and an
embedding: the derivative for some rows is as large as the table.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from passes.compat import statically_known_true
from passes.graphs.node_facts import arguments_of, is_pure, named_dims, same_sizes, tensors
from passes.graphs.op_kinds import broadcasts, dims_order, op_name

aten = torch.ops.aten
ATTENTION = "scaled_dot_product_attention"
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten"})


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


Operands: TypeAlias = tuple[tuple[Node, RowsPlace | None], ...]
"""The operands of a call, each with the place of the rows in it; None for one that every row reads as a whole."""


def row_operands(node: Node, place: RowsPlace) -> Operands | None:
    """Returns the operands of a call whose result has rows at `place`, each with the place where it has the same rows.

    That place is None for an operand that every row of the result reads as a whole. Returns None alone where the call
    is not known to compute each row of its result from the same row of its operands."""
    if node.target is operator.getitem:
        return ((node.args[0], place),) if isinstance(node.args[0], Node) else None
    name = op_name(node)
    if not name or not (is_pure(node) or _draws_nothing(node, name)):
        return None
    if name in _ELEMENTWISE or broadcasts(node):
        operands = (source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor))
        return tuple((source, aligned_place(node, source, place)) for source in operands)
    rule = _RULES.get(name)
    return None if rule is None else rule(node, place)


def row_result(node: Node, operand: Node, place: RowsPlace) -> tuple[RowsPlace, Operands] | None:
    """Returns the place of the rows in the result of the call `node`, whose argument `operand` has them at `place`; and
    what `row_operands` returns for that result. None where the call is not known to keep rows apart."""
    value = next(tensors(node.meta.get("val")), None)
    if value is None:
        return None
    moved = moved_place(shape_of(operand), tuple(value.shape), place) if op_name(node) in RESHAPES else None
    for candidate in (replace(place, dim=dim) for dim in range(value.dim())) if moved is None else (moved,):
        operands = row_operands(node, candidate)
        if operands is not None and all(at == place for source, at in operands if source is operand):
            return candidate, operands
    return None


def _draws_nothing(node: Node, name: str) -> bool:
    """Returns whether a call is dropout that is switched off."""
    arguments = arguments_of(node)
    return name == "dropout" and (arguments["p"] == 0.0 or not arguments["train"])


def _sources(node: Node, *places: RowsPlace | None) -> Operands:
    """Returns the operands with these places, in the order of the arguments; those that follow are read as a whole."""
    given = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, Node)]
    return tuple((source, places[number] if number < len(places) else None) for number, source in enumerate(given))


def _dims(node: Node, name: str = "dim") -> frozenset[int]:
    """Returns the dimensions that an argument names, counted from the front; all where it names none."""
    return frozenset(named_dims(arguments_of(node).get(name), len(shape_of(node.all_input_nodes[0]))))


def _product_of_matrices(node: Node, place: RowsPlace) -> Operands | None:
    """`matmul` and its kin, where the rows are those of the first matrix, or columns of the second, or of a batch."""
    added: Operands = ()
    first, second = [value for value in node.args if isinstance(value, Node)][-2:]
    if op_name(node) in ("addmm", "baddbmm"):
        source: Any = node.args[0]
        added = ((source, aligned_place(node, source, place)),)
    ranks, dims = (len(shape_of(first)), len(shape_of(second))), len(shape_of(node))
    if ranks[0] < 2:
        return None
    if ranks[1] == 1:
        return (*added, (first, place), (second, None))
    if place.dim == dims - 1:
        return (*added, (first, None), (second, replace(place, dim=ranks[1] - 1)))
    if place.dim == dims - 2:
        return (*added, (first, replace(place, dim=ranks[0] - 2)), (second, None))
    return (*added, (first, aligned_place(node, first, place)), (second, aligned_place(node, second, place)))


def _einsum(node: Node, place: RowsPlace) -> Operands | None:
    equation, given = node.args[:2]
    left, arrow, right = str(equation).replace(" ", "").partition("->")
    letters = left.split(",")
    if not arrow or "." in left or any(len(set(one)) < len(one) for one in (*letters, right)):
        return None
    letter = right[place.dim]
    sources: Any = given
    return tuple(
        (source, replace(place, dim=one.index(letter)) if letter in one else None)
        for source, one in zip(sources, letters, strict=True)
    )


def _all_but(last: int) -> Callable[[Node, RowsPlace], Operands | None]:
    """Returns the rule of operators that mix the `last` dimensions only."""

    def rule(node: Node, place: RowsPlace) -> Operands | None:
        return _sources(node, place) if place.dim < len(shape_of(node)) - last else None

    return rule


def _norm(node: Node, place: RowsPlace) -> Operands | None:
    shape: Any = node.args[1]
    return _sources(node, place) if place.dim < len(shape_of(node)) - len(shape) else None


def _samples(node: Node, place: RowsPlace) -> Operands | None:
    return _sources(node, place) if place.dim == 0 else None


def _along(name: str = "dim") -> Callable[[Node, RowsPlace], Operands | None]:
    """Returns the rule of operators that work along dimensions, and keep them."""

    def rule(node: Node, place: RowsPlace) -> Operands | None:
        return None if place.dim in _dims(node, name) else _sources(node, place)

    return rule


def _reduction(node: Node, place: RowsPlace) -> Operands | None:
    """Reductions, `select` and `unbind`, whose result may lack the dimensions that they work along."""
    dims, dim = _dims(node), place.dim
    if not arguments_of(node).get("keepdim", False):
        kept = [number for number in range(len(shape_of(node.args[0]))) if number not in dims]
        if dim >= len(kept):
            return None
        dim = kept[dim]
    return None if dim in dims else _sources(node, replace(place, dim=dim))


def _squeeze(node: Node, place: RowsPlace) -> Operands | None:
    shape = shape_of(node.args[0])
    if "dim" not in arguments_of(node):
        return None
    squeezed = [dim for dim in _dims(node) if statically_known_true(shape[dim] == 1)]
    dim = [dim for dim in range(len(shape)) if dim not in squeezed][place.dim]
    return None if dim in _dims(node) else _sources(node, replace(place, dim=dim))  # a tile may have one row


def _unsqueeze(node: Node, place: RowsPlace) -> Operands | None:
    dim = int(node.args[1]) % len(shape_of(node))  # type: ignore[arg-type]
    return None if place.dim == dim else _sources(node, replace(place, dim=place.dim - (place.dim > dim)))


def _slice(node: Node, place: RowsPlace) -> Operands | None:
    """`slice` along another dimension than the rows, or one that takes all of them."""
    whole = statically_known_true(shape_of(node)[place.dim] == shape_of(node.args[0])[place.dim])
    from_start = arguments_of(node)["start"] in (None, 0) and arguments_of(node)["step"] == 1
    return _sources(node, place) if place.dim not in _dims(node) or (whole and from_start) else None


def _permutation(node: Node, place: RowsPlace) -> Operands | None:
    order = dims_order(node)
    return None if order is None else _sources(node, replace(place, dim=order[place.dim]))


def _reshape(node: Node, place: RowsPlace) -> Operands | None:
    source = node.args[0]
    moved = moved_place(shape_of(node), shape_of(source), place)
    return None if moved is None or node.target is aten.view.dtype else _sources(node, moved)


def _expand(node: Node, place: RowsPlace) -> Operands | None:
    source: Any = node.args[0]
    return ((source, aligned_place(node, source, place)),)


def _joined(node: Node, place: RowsPlace) -> Operands | None:
    """`cat` and `stack`."""
    dim, count = int(arguments_of(node).get("dim", 0)), len(shape_of(node))
    if place.dim == dim % count or any(len(shape_of(source)) == 1 for source in node.all_input_nodes if count > 1):
        return None
    moved = replace(place, dim=place.dim - 1) if op_name(node) == "stack" and place.dim > dim % count else place
    return tuple((source, moved) for source in node.all_input_nodes)


def _pad(node: Node, place: RowsPlace) -> Operands | None:
    pads: Any = node.args[1]
    from_end = 2 * (len(shape_of(node)) - 1 - place.dim)
    constant = arguments_of(node).get("mode", "constant") == "constant"
    return _sources(node, place) if constant and not any(pads[from_end : from_end + 2]) else None


def _gather(node: Node, place: RowsPlace) -> Operands | None:
    sizes = [shape_of(source)[place.dim : place.dim + 1] for source in node.all_input_nodes]
    equal = all(same_sizes(size, sizes[0]) for size in sizes)
    return _sources(node, place, place, place) if place.dim not in _dims(node) and equal else None


def _attention(node: Node, place: RowsPlace) -> Operands | None:
    """Attention without dropout, where the rows are samples or heads; keys and values may have fewer heads."""
    arguments = arguments_of(node)
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    dim = place.dim
    if arguments["dropout_p"] or dim >= len(shape_of(node)) - 2 or len(shape_of(key)) != len(shape_of(query)):
        return None
    group = shape_of(query)[dim] // shape_of(key)[dim]
    shared = aligned_place(node, key, place)
    if shared is not None:
        if not statically_known_true(place.inner % group == 0):
            return None
        shared = replace(shared, inner=place.inner // group)
    mask = arguments.get("attn_mask")
    masks = ((mask, aligned_place(node, mask, place)),) if isinstance(mask, Node) else ()
    return ((query, place), (key, shared), (value, shared), *masks)


_ELEMENTWISE = frozenset(
    {
        "to", "_to_copy", "contiguous", "clone", "alias", "detach", "dropout", "expand_as", "full_like", "ones_like",
        "zeros_like",
    }
)  # fmt: skip
_RULES: Mapping[str, Callable[[Node, RowsPlace], Operands | None]] = {
    **dict.fromkeys(("mm", "bmm", "matmul", "addmm", "baddbmm"), _product_of_matrices),
    "einsum": _einsum,
    "linear": _all_but(1),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    "group_norm": _samples,
    **dict.fromkeys(
        ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "topk", "sort", "argsort", "glu",
         "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "repeat_interleave"),
        _along(),
    ),
    **dict.fromkeys(("flip", "roll"), _along("dims")),
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "var", "std", "any", "all",
         "linalg_vector_norm", "select", "unbind"),
        _reduction,
    ),
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "slice": _slice,
    **dict.fromkeys(("transpose", "permute", "t", "mT", "swapaxes", "swapdims"), _permutation),
    **dict.fromkeys(RESHAPES, _reshape),
    "expand": _expand,
    **dict.fromkeys(("cat", "concat", "stack"), _joined),
    **dict.fromkeys(("constant_pad_nd", "pad"), _pad),
    **dict.fromkeys(("tril", "triu"), _all_but(2)),
    **dict.fromkeys(("gather", "scatter"), _gather),
    ATTENTION: _attention,
}  # fmt: skip

"""Finds written-out attention, softmax(Q Kᵀ · scale + mask) V, and says why similar calls are not
attention."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from passes.compat import statically_known_true
from passes.graphs.node_facts import same_sizes
from passes.graphs.op_kinds import dims_order, is_cast, op_name
from passes.patterns.mask_rows import MASKS_BELOW, MaskRows
from passes.rewrite_pattern import NoMatch, check_unwritten

PRODUCTS = frozenset({"matmul", "bmm"})
PASS_ON = frozenset({"alias", "contiguous", "clone"})


@dataclass(frozen=True)
class Scale:
    """A step from Q Kᵀ to the softmax: the scores are multiplied with the number `by`."""

    by: float


@dataclass(frozen=True)
class Add:
    """A step from Q Kᵀ to the softmax: the tensor `mask` is added to the scores."""

    mask: Node


@dataclass(frozen=True)
class Fill:
    """A step from Q Kᵀ to the softmax: scores are replaced by `number` where the bool `mask` equals `where`."""

    mask: Node
    where: bool
    number: float


ScoreStep: TypeAlias = Scale | Add | Fill


def only_reader(node: Node) -> Node:
    readers = list(node.users)
    if any(reader.op == "output" for reader in readers):
        raise NoMatch(f"{node.name} is returned as well")
    if len(readers) != 1:
        raise NoMatch(f"{node.name} is read by {', '.join(reader.name for reader in readers)}, not by one call alone")
    return readers[0]


def walk_up_scores(node: Node, reader: Node) -> tuple[Node, list[ScoreStep]]:
    """Returns the node of Q Kᵀ that the scores `node` are computed from, and the steps from there, last first. `reader`
    is the call that reads `node`: the softmax, or a step.

    Raises `NoMatch` if the scores come from anything else, or if anything but the next step reads a value in
    between."""
    only_reader(node)
    name = op_name(node).removesuffix("_")
    if name in PRODUCTS:
        return node, []
    first: Any = node.args[0] if node.args else None
    if name in PASS_ON or (is_cast(node) and node.meta["val"].is_floating_point()):
        return walk_up_scores(first, node)
    step: ScoreStep | None = None
    if name in ("mul", "div") and len(node.args) == 2 and not node.kwargs:
        if (number := _number(node.args[1])) is not None and number > 0:
            step = Scale(number if name == "mul" else 1 / number)
    elif name == "masked_fill" and (number := _number(node.args[2])) is not None:
        mask: Any = node.args[1]
        step = Fill(mask, True, number)
    elif name == "where" and (number := _number(node.args[2])) is not None:
        mask, first = first, node.args[1]
        step = Fill(mask, False, number)
    elif name == "add" and not node.kwargs:
        return _added(node)
    if step is None or not isinstance(first, Node):
        raise NoMatch(f"the attention scores come from {name or node.name}, not from a product of queries and keys")
    scores, steps = walk_up_scores(first, node)
    return scores, [step, *steps]


def _added(node: Node) -> tuple[Node, list[ScoreStep]]:
    """As `walk_up_scores`, for a sum of scores and a mask in either order. Raises `NoMatch` if neither operand comes
    from Q Kᵀ."""
    mismatch = NoMatch(f"{node.name} does not add a tensor to the attention scores")
    for scores, mask in (node.args[1::-1], node.args[:2]):
        if not (isinstance(scores, Node) and isinstance(mask, Node)):
            continue
        try:
            product, steps = walk_up_scores(scores, node)
        except NoMatch as reason:
            mismatch = reason
        else:
            return product, [Add(mask), *steps]
    raise mismatch


def _number(value: Any) -> float | None:
    """Returns a number, also one in a tensor without dimensions; None for anything else."""
    if isinstance(value, Node) and op_name(value) in ("full", "scalar_tensor") and value.meta["val"].dim() == 0:
        value = value.args[-1]
    return float(value) if type(value) in (int, float) else None


@dataclass(frozen=True)
class AttentionMatch:
    """Written-out attention, with the steps from Q Kᵀ to the softmax (scale, masks), in order."""

    softmax: Node
    query: Node
    key: Node
    """[..., keys, width], or [..., width, keys] if `key_turned`."""
    key_turned: bool
    value: Node
    result: Node
    steps: tuple[ScoreStep, ...]
    scores: Node
    """Q Kᵀ."""
    clears_rows: bool = False
    """Whether the fused form must clear rows in which every score is masked."""


def softmaxes(graph: Graph) -> Iterator[Node]:
    """Yields the softmaxes whose result is multiplied with a matrix, in the graph's order."""
    return (node for node in graph.nodes if op_name(node) in ("softmax", "_softmax") and _reaches_product(node))


def match_attention(softmax: Node, rows: MaskRows) -> AttentionMatch:
    """Returns the attention that a softmax is part of. `rows` tells whether masks leave a score in every row.

    Raises `NoMatch`, with the reason, where `scaled_dot_product_attention` would compute something else."""
    dim: Any = softmax.args[1]
    dims = softmax.meta["val"].dim()
    if dim % dims != dims - 1:
        raise NoMatch("the softmax of attention is not over the keys")
    result = _downwards(softmax)
    source: Any = softmax.args[0]
    scores, steps = walk_up_scores(source, softmax)
    query: Any
    key: Any
    value: Any
    (query, key), value = scores.args, result.args[1]
    turned = _unturned(key)
    match = AttentionMatch(softmax, query, turned or key, turned is None, value, result, tuple(reversed(steps)), scores)
    _check(match)
    if _may_mask_whole_rows(match.steps, rows):
        raise NoMatch("the attention mask may mask every score of a row")
    fills = [step for step in match.steps if isinstance(step, Fill) and step.number != float("-inf")]
    return replace(match, clears_rows=any(not rows.masks_no_row_whole(fill.mask, fill.where) for fill in fills))


def _may_mask_whole_rows(steps: tuple[ScoreStep, ...], rows: MaskRows) -> bool:
    """Returns whether all scores of a row may be masked by a finite number, other than by a single `Fill`."""
    masks = [step for step in steps if not isinstance(step, Scale)]
    fills = [step for step in masks if isinstance(step, Fill)]
    terms = [rows.masking_terms(step.mask) for step in masks if isinstance(step, Add)]
    if None in terms:
        return True
    finite = sum(term or 0 for term in terms) + sum(fill.number != float("-inf") for fill in fills)
    infinite = len(fills) - sum(fill.number != float("-inf") for fill in fills)
    return finite > 0 and finite + infinite > 1


def _reaches_product(node: Node) -> bool:
    return any(
        (op_name(user) in PRODUCTS and user.args[0] is node) or (_passes_on(user) and _reaches_product(user))
        for user in node.users
    )


def _passes_on(node: Node) -> bool:
    return op_name(node) in PASS_ON | {"dropout"} or is_cast(node)


def _downwards(node: Node) -> Node:
    """Returns the product with V. Raises `NoMatch` if anything else reads the probabilities, or dropout drops some."""
    while True:
        user = only_reader(node)
        if op_name(user) in PRODUCTS and user.args[0] is node:
            return user
        if not _passes_on(user):
            raise NoMatch(f"the attention probabilities are read by {user.name}, not by a product with values")
        if op_name(user) == "dropout" and user.args[1] and user.args[2]:
            raise NoMatch("dropout in the fused attention would draw other random numbers")
        node = user


def _unturned(key: Node) -> Node | None:
    """Returns the matrix that `key` is the transpose of, or None if it is no transpose."""
    order, dims = dims_order(key), key.meta["val"].dim()
    source: Any = key.args[0] if order and order[-2:] == [dims - 1, dims - 2] and op_name(key) == "transpose" else None
    return source


def _check(match: AttentionMatch) -> None:
    values = [operand.meta["val"] for operand in (match.query, match.key, match.value)]
    dims, dtypes = {value.dim() for value in values}, {value.dtype for value in values}
    if dims not in ({3}, {4}):
        raise NoMatch(f"queries, keys and values have {' and '.join(map(str, sorted(dims)))} dimensions, not 3 or 4")
    leading = [value.shape[:-2] for value in values]
    if not all(same_sizes(leading[0], other) for other in leading[1:]):
        raise NoMatch("queries, keys and values differ in batch or heads")
    if len(dtypes) != 1:
        raise NoMatch("queries, keys and values differ in dtype")
    fills = [step for step in match.steps if isinstance(step, Fill)]
    adds = [step for step in match.steps if isinstance(step, Add)]
    for fill in fills:
        if fill.mask.meta["val"].dtype != torch.bool:
            raise NoMatch("the attention mask is not of dtype bool")
        if fill.number > MASKS_BELOW:
            raise NoMatch(f"masked scores are set to {fill.number:g}, which still gives them weight in the softmax")
    if any(add.mask.meta["val"].dtype not in dtypes for add in adds):
        raise NoMatch("the attention mask differs in dtype from the queries")
    masks = [*(fill.mask for fill in fills), *(add.mask for add in adds)]
    if any(_shape_exceeds(mask, match.scores) for mask in masks):
        raise NoMatch("the attention mask has more elements than the scores")
    # The fused operator reads all inputs where V is read.
    check_unwritten(
        (match.query, match.key, *masks), match.scores, match.result, "an input of the attention before its last call"
    )


def _shape_exceeds(mask: Node, scores: Node) -> bool:
    """Returns whether adding the mask would broadcast the scores to a larger shape."""
    given, expected = mask.meta["val"].shape, scores.meta["val"].shape
    if len(given) > len(expected):
        return True
    aligned = zip(reversed(given), reversed(expected), strict=False)
    return not all(statically_known_true(one == 1) or statically_known_true(one == other) for one, other in aligned)

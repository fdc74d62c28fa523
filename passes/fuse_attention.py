"""Replaces written-out attention by `scaled_dot_product_attention`, which never holds the probabilities."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import statically_known_true
from passes.graph_pass import Pass
from passes.graphs.edit import erase_unread, new_call, on_stored_values, refresh
from passes.graphs.node_facts import binds_new_symbols, same_sizes
from passes.graphs.op_kinds import dims_order, is_cast, op_name
from passes.graphs.verify import VerifyError
from passes.patterns.mask_rows import MASKS_BELOW, MaskRows
from passes.rewrite_pattern import Found, NoMatch, check_named, check_unwritten, judged

aten = torch.ops.aten
_PRODUCTS = frozenset({"matmul", "bmm"})
_PASS_ON = frozenset({"alias", "contiguous", "clone"})


def find_attentions(graph_module: GraphModule) -> tuple[Found, ...]:
    """Returns the softmaxes in an operator graph that look like part of attention, in the graph's order, each with the
    reason if `FuseAttention` cannot replace it."""
    match = partial(_match_attention, rows=MaskRows())
    return tuple(Found(node.name, reason) for node, _, reason in judged(_softmaxes(graph_module.graph), match))


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Replaces softmax(Q Kᵀ · scale + mask) V by `scaled_dot_product_attention`, where that computes the same.

    Attention whose probabilities something else reads is left alone: see `find_attentions`. Results differ by rounding.
    A row in which every score is masked with -inf is NaN in the plain model, and zeros here.

    Before:
        matmul: f32[2, 4, 8, 8] = aten.matmul(query, transpose)
        mul: f32[2, 4, 8, 8] = aten.mul.Tensor(matmul, 0.25)
        masked_fill: f32[2, 4, 8, 8] = aten.masked_fill.Scalar(mul, unseen, -inf)
        softmax: f32[2, 4, 8, 8] = aten.softmax.int(masked_fill, -1)
        matmul_1: f32[2, 4, 8, 16] = aten.matmul(softmax, value)
    After:
        logical_not: b8[8, 8] = aten.logical_not(unseen)
        scaled_dot_product_attention: f32[2, 4, 8, 16] = aten.scaled_dot_product_attention(query, key, value,
            logical_not, scale=0.25)
    """

    attentions: frozenset[str] | None = None
    """Names of the softmaxes to rewrite; None: all that can be."""

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        known = {softmax.name: "" for softmax in _softmaxes(graph_module.graph)}
        mend = "give names that find_attentions returns"
        check_named(self.attentions or (), known, "it is no softmax whose result is multiplied with a matrix", mend)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        match_one = partial(_match_attention, rows=MaskRows())
        for softmax, match, reason in judged(_softmaxes(graph), match_one, self.attentions):
            if match is not None:
                with on_stored_values(graph):
                    _fuse(match)
            elif self.attentions is not None:
                raise VerifyError(softmax.name, reason, "name softmaxes that find_attentions says can be rewritten")
        return graph_module


@dataclass(frozen=True)
class _Scale:
    """A step from Q Kᵀ to the softmax: the scores are multiplied with the number `by`."""

    by: float


@dataclass(frozen=True)
class _Add:
    """A step from Q Kᵀ to the softmax: the tensor `mask` is added to the scores."""

    mask: Node


@dataclass(frozen=True)
class _Fill:
    """A step from Q Kᵀ to the softmax: scores are replaced by `number` where the bool `mask` equals `where`."""

    mask: Node
    where: bool
    number: float


_ScoreStep: TypeAlias = _Scale | _Add | _Fill


@dataclass(frozen=True)
class _AttentionMatch:
    """Written-out attention, with the steps from Q Kᵀ to the softmax (scale, masks), in order."""

    softmax: Node
    query: Node
    key: Node
    """[..., keys, width], or [..., width, keys] if `key_turned`."""
    key_turned: bool
    value: Node
    result: Node
    steps: tuple[_ScoreStep, ...]
    scores: Node
    """Q Kᵀ."""
    clears_rows: bool = False
    """Whether the fused form must clear rows in which every score is masked."""


def _softmaxes(graph: Graph) -> Iterator[Node]:
    """Yields the softmaxes whose result is multiplied with a matrix, in the graph's order."""
    return (node for node in graph.nodes if op_name(node) in ("softmax", "_softmax") and _reaches_product(node))


def _match_attention(softmax: Node, rows: MaskRows) -> _AttentionMatch:
    """Returns the attention that a softmax is part of. `rows` tells whether masks leave a score in every row.

    Raises `NoMatch`, with the reason, where `scaled_dot_product_attention` would compute something else."""
    dim: Any = softmax.args[1]
    dims = softmax.meta["val"].dim()
    if dim % dims != dims - 1:
        raise NoMatch("the softmax of attention is not over the keys")
    result = _downwards(softmax)
    given: Any = softmax.args[0]
    scores, steps = _walk_up_scores(given)
    operands: Any = (*scores.args, result.args[1])
    query, key, value = operands
    turned = _unturned(key)
    match = _AttentionMatch(softmax, query, turned or key, turned is None, value, result, tuple(steps[::-1]), scores)
    _check(match)
    if _may_mask_whole_rows(match.steps, rows):
        raise NoMatch("the attention mask may mask every score of a row")
    fills = [step for step in match.steps if isinstance(step, _Fill) and step.number != float("-inf")]
    return replace(match, clears_rows=any(not rows.masks_no_row_whole(fill.mask, fill.where) for fill in fills))


def _may_mask_whole_rows(steps: tuple[_ScoreStep, ...], rows: MaskRows) -> bool:
    """Returns whether all scores of a row may be masked by a finite number, other than by a single `_Fill`."""
    masks = [step for step in steps if not isinstance(step, _Scale)]
    fills = [step for step in masks if isinstance(step, _Fill)]
    terms = [rows.masking_terms(step.mask) for step in masks if isinstance(step, _Add)]
    if None in terms:
        return True
    finite = sum(term or 0 for term in terms) + sum(fill.number != float("-inf") for fill in fills)
    infinite = len(fills) - sum(fill.number != float("-inf") for fill in fills)
    return finite > 0 and finite + infinite > 1


def _reaches_product(node: Node) -> bool:
    return any(
        (op_name(user) in _PRODUCTS and user.args[0] is node) or (_passes_on(user) and _reaches_product(user))
        for user in node.users
    )


def _passes_on(node: Node) -> bool:
    return op_name(node) in _PASS_ON | {"dropout"} or is_cast(node)


def _downwards(node: Node) -> Node:
    """Returns the product with V. Raises `NoMatch` if anything else reads the probabilities, or dropout drops some."""
    while True:
        user = _only_reader(node)
        if op_name(user) in _PRODUCTS and user.args[0] is node:
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


def _check(match: _AttentionMatch) -> None:
    values = [operand.meta["val"] for operand in (match.query, match.key, match.value)]
    dims, dtypes = {value.dim() for value in values}, {value.dtype for value in values}
    if dims not in ({3}, {4}):
        raise NoMatch(f"queries, keys and values have {' and '.join(map(str, sorted(dims)))} dimensions, not 3 or 4")
    leading = [value.shape[:-2] for value in values]
    if not all(same_sizes(leading[0], other) for other in leading[1:]):
        raise NoMatch("queries, keys and values differ in batch or heads")
    if len(dtypes) != 1:
        raise NoMatch("queries, keys and values differ in dtype")
    fills = [step for step in match.steps if isinstance(step, _Fill)]
    adds = [step for step in match.steps if isinstance(step, _Add)]
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


def _only_reader(node: Node) -> Node:
    readers = list(node.users)
    if any(reader.op == "output" for reader in readers):
        raise NoMatch(f"{node.name} is returned as well")
    if len(readers) != 1:
        raise NoMatch(f"{node.name} is read by {', '.join(reader.name for reader in readers)}, not by one call alone")
    return readers[0]


def _walk_up_scores(node: Node) -> tuple[Node, list[_ScoreStep]]:
    """Returns the node of Q Kᵀ that the scores `node` are computed from, and the steps from there, last first. Raises
    `NoMatch` if the scores come from anything else, or if anything but the next step reads a value in between."""
    _only_reader(node)
    name = op_name(node).removesuffix("_")
    if name in _PRODUCTS:
        return node, []
    first: Any = node.args[0] if node.args else None
    if name in _PASS_ON or (is_cast(node) and node.meta["val"].is_floating_point()):
        return _walk_up_scores(first)
    step: _ScoreStep | None = None
    if name in ("mul", "div") and len(node.args) == 2 and not node.kwargs:
        if (number := _number(node.args[1])) is not None and number > 0:
            step = _Scale(number if name == "mul" else 1 / number)
    elif name == "masked_fill" and (number := _number(node.args[2])) is not None:
        mask: Any = node.args[1]
        step = _Fill(mask, True, number)
    elif name == "where" and (number := _number(node.args[2])) is not None:
        mask, first = first, node.args[1]
        step = _Fill(mask, False, number)
    elif name == "add" and not node.kwargs:
        return _added(node)
    if step is None or not isinstance(first, Node):
        raise NoMatch(f"the attention scores come from {name or node.name}, not from a product of queries and keys")
    scores, steps = _walk_up_scores(first)
    return scores, [step, *steps]


def _added(node: Node) -> tuple[Node, list[_ScoreStep]]:
    """As `_walk_up_scores`, for a sum of scores and a mask in either order."""
    mismatch = NoMatch(f"{node.name} does not add a tensor to the attention scores")
    for scores, mask in (node.args[1::-1], node.args[:2]):
        if not (isinstance(scores, Node) and isinstance(mask, Node)):
            continue
        try:
            product, steps = _walk_up_scores(scores)
        except NoMatch as reason:
            mismatch = reason
        else:
            return product, [_Add(mask), *steps]
    raise mismatch


def _number(value: Any) -> float | None:
    """Returns a number, also one in a tensor without dimensions; None for anything else."""
    if isinstance(value, Node) and op_name(value) in ("full", "scalar_tensor") and value.meta["val"].dim() == 0:
        value = value.args[-1]
    return float(value) if type(value) in (int, float) else None


def _fuse(match: _AttentionMatch) -> None:
    """Puts the fused operator in the place of one attention."""
    call = partial(new_call, match.softmax)
    with match.result.graph.inserting_before(match.result):
        key = call(aten.transpose.int, match.key, -1, -2) if match.key_turned else match.key
        query, mask, scale = _query_mask_scale(match, call)
        tensors = [query, key, match.value]
        flat = match.query.meta["val"].dim() == 3
        if flat:  # kernels need a dimension of heads
            tensors = [call(aten.unsqueeze.default, tensor, 1) for tensor in tensors]
            if mask is not None and mask.meta["val"].dim() == 3:
                mask = call(aten.unsqueeze.default, mask, 1)
        options = () if mask is None else (mask,)
        result = call(aten.scaled_dot_product_attention.default, *tensors, *options, scale=scale)
        if flat:
            result = call(aten.squeeze.dim, result, 1)
        dtype = match.result.meta["val"].dtype
        if result.meta["val"].dtype != dtype:
            result = call(aten.to.dtype, result, dtype)
    before = match.result.meta["val"]
    match.result.replace_all_uses_with(result)
    kept = (match.query, match.key, match.value)
    erase_unread([match.result], lambda node: node.op == "call_function" and node not in kept)
    if result.meta["val"].stride() != before.stride():
        _refresh_behind(result)


def _query_mask_scale(match: _AttentionMatch, call: Callable[..., Node]) -> tuple[Node, Node | None, float]:
    """Returns query, mask and scale that have the effect of the steps; the mask is bool where that suffices."""
    mask, scale, below = None, 1.0, MASKS_BELOW / 2
    masks = [step for step in match.steps if not isinstance(step, _Scale)]
    for step in match.steps:
        if isinstance(step, _Scale):
            scale *= step.by
            if mask is not None and mask.meta["val"].dtype != torch.bool:
                mask, below = call(aten.mul.Tensor, mask, step.by), below * step.by
        elif isinstance(step, _Add):
            mask = step.mask if mask is None else call(aten.add.Tensor, mask, step.mask)
        elif step.number == float("-inf") and len(masks) == 1:
            mask = call(aten.logical_not.default, step.mask) if step.where else step.mask
        else:  # a mask to be added, with a number where scores are filled
            masked = step.mask if step.where else call(aten.logical_not.default, step.mask)
            if mask is not None:
                mask = call(aten.where.ScalarSelf, masked, step.number, mask)
            else:
                zeros = call(aten.zeros_like.default, masked, dtype=match.query.meta["val"].dtype)
                mask = call(aten.masked_fill.Scalar, zeros, masked, step.number)
    if mask is None or not match.clears_rows:
        return match.query, mask, scale
    # Zeros in rows in which every score is masked: all scores of such a row are then alike, and none gets a gradient;
    # see `passes.patterns.mask_rows` for what kernels would compute otherwise.
    whole = call(aten.le.Scalar, call(aten.amax.default, mask, [-1], True), below)
    query = call(aten.masked_fill.Scalar, match.query, whole, 0.0)
    return query, call(aten.masked_fill.Scalar, mask, whole, 0.0), scale


def _refresh_behind(node: Node) -> None:
    """Recomputes the stored values whose strides follow from a node's; a `view` may have to become a `reshape`."""
    for user in sorted(node.users):
        if user.op != "call_function" or binds_new_symbols(user):
            continue
        before = user.meta["val"]
        if op_name(user) == "view":
            user.target = aten.reshape.default
        refresh(user)
        if isinstance(before, torch.Tensor) and user.meta["val"].stride() == before.stride():
            continue
        _refresh_behind(user)

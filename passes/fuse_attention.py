"""Replaces written-out attention by `scaled_dot_product_attention`, which never holds the probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.edit import erase_unread, new_call, on_stored_values, refresh
from passes.graphs.node_facts import binds_new_symbols
from passes.graphs.op_kinds import op_name
from passes.graphs.verify import VerifyError
from passes.patterns.attention_pattern import Add, AttentionMatch, Scale, match_attention, softmaxes
from passes.patterns.mask_rows import MASKS_BELOW, MaskRows
from passes.rewrite_pattern import Found, check_named, judged

aten = torch.ops.aten


def find_attentions(graph_module: GraphModule) -> tuple[Found, ...]:
    """Returns the softmaxes in an operator graph that look like part of attention, in the graph's order, each with the
    reason if `FuseAttention` cannot replace it."""
    match = partial(match_attention, rows=MaskRows(graph_module))
    return tuple(Found(node.name, reason) for node, _, reason in judged(softmaxes(graph_module.graph), match))


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
        known = {softmax.name: "" for softmax in softmaxes(graph_module.graph)}
        mend = "give names that find_attentions returns"
        check_named(self.attentions or (), known, "it is no softmax whose result is multiplied with a matrix", mend)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        match_one = partial(match_attention, rows=MaskRows(graph_module))
        for softmax, match, reason in judged(softmaxes(graph), match_one, self.attentions):
            if match is not None:
                with on_stored_values(graph):
                    _fuse(match)
            elif self.attentions is not None:
                raise VerifyError(softmax.name, reason, "name softmaxes that find_attentions says can be rewritten")
        return graph_module


def _fuse(match: AttentionMatch) -> None:
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


def _query_mask_scale(match: AttentionMatch, call: Callable[..., Node]) -> tuple[Node, Node | None, float]:
    """Returns query, mask and scale that have the effect of the steps; the mask is bool where that suffices."""
    mask, scale, below = None, 1.0, MASKS_BELOW / 2
    masks = [step for step in match.steps if not isinstance(step, Scale)]
    for step in match.steps:
        if isinstance(step, Scale):
            scale *= step.by
            if mask is not None and mask.meta["val"].dtype != torch.bool:
                mask, below = call(aten.mul.Tensor, mask, step.by), below * step.by
        elif isinstance(step, Add):
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

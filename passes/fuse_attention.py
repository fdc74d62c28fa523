"""Replaces written-out attention by `scaled_dot_product_attention`, which never holds the probabilities."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.edit import erase_unread, new_call, on_stored_values, refresh
from passes.graphs.node_facts import binds_new_symbols
from passes.graphs.op_kinds import op_name
from passes.graphs.verify import VerifyError
from passes.patterns.attention_pattern import Add, AttentionMatch, Fill, Scale, match_attention, softmaxes
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
                    _Rewrite(match).apply()
            elif self.attentions is not None:
                raise VerifyError(softmax.name, reason, "name softmaxes that find_attentions says can be rewritten")
        return graph_module


class _Rewrite:
    """The rewriting of one attention."""

    def __init__(self, match: AttentionMatch) -> None:
        self.match = match
        self.graph: Graph = match.softmax.graph

    def apply(self) -> None:
        match = self.match
        with self.graph.inserting_before(match.result):
            key = self._call(aten.transpose.int, match.key, -1, -2) if match.key_turned else match.key
            query, mask, scale = self._query_mask_scale()
            tensors = [query, key, match.value]
            flat = match.query.meta["val"].dim() == 3
            if flat:  # kernels need a dimension of heads
                tensors = [self._call(aten.unsqueeze.default, tensor, 1) for tensor in tensors]
                if mask is not None and mask.meta["val"].dim() == 3:
                    mask = self._call(aten.unsqueeze.default, mask, 1)
            options = () if mask is None else (mask,)
            result = self._call(aten.scaled_dot_product_attention.default, *tensors, *options, scale=scale)
            if flat:
                result = self._call(aten.squeeze.dim, result, 1)
            dtype = match.result.meta["val"].dtype
            if result.meta["val"].dtype != dtype:
                result = self._call(aten.to.dtype, result, dtype)
        before = match.result.meta["val"]
        match.result.replace_all_uses_with(result)
        kept = (match.query, match.key, match.value)
        erase_unread([match.result], lambda node: node.op == "call_function" and node not in kept)
        if result.meta["val"].stride() != before.stride():
            _refresh_behind(result)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return new_call(self.match.softmax, target, *args, **kwargs)

    def _query_mask_scale(self) -> tuple[Node, Node | None, float]:
        """Returns query, mask and scale that have the effect of the steps; the mask is bool where that suffices."""
        match, mask, scale, below = self.match, None, 1.0, MASKS_BELOW / 2
        masks = [step for step in match.steps if not isinstance(step, Scale)]
        for step in match.steps:
            if isinstance(step, Scale):
                scale *= step.by
                if mask is not None and mask.meta["val"].dtype != torch.bool:
                    mask, below = self._call(aten.mul.Tensor, mask, step.by), below * step.by
            elif isinstance(step, Add):
                mask = step.mask if mask is None else self._call(aten.add.Tensor, mask, step.mask)
            elif step.number == float("-inf") and len(masks) == 1:
                mask = self._call(aten.logical_not.default, step.mask) if step.where else step.mask
            else:
                mask = self._filled(step, mask)
        if mask is not None and match.clears_rows:
            return *self._cleared(mask, below), scale
        return match.query, mask, scale

    def _filled(self, step: Fill, mask: Node | None) -> Node:
        """Returns a mask to be added, with a number where scores are filled."""
        masked = step.mask if step.where else self._call(aten.logical_not.default, step.mask)
        if mask is not None:
            return self._call(aten.where.ScalarSelf, masked, step.number, mask)
        zeros = self._call(aten.zeros_like.default, masked, dtype=self.match.query.meta["val"].dtype)
        return self._call(aten.masked_fill.Scalar, zeros, masked, step.number)

    def _cleared(self, mask: Node, below: float) -> tuple[Node, Node]:
        """Returns query and mask with zeros in rows in which every score is masked. All scores of such a row are then
        alike, and none gets a gradient; see `passes.patterns.mask_rows` for what kernels would compute otherwise."""
        largest = self._call(aten.amax.default, mask, [-1], True)
        whole = self._call(aten.le.Scalar, largest, below)
        query = self._call(aten.masked_fill.Scalar, self.match.query, whole, 0.0)
        return query, self._call(aten.masked_fill.Scalar, mask, whole, 0.0)


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

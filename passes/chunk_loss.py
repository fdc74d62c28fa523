"""Losses of a linear layer's logits, computed by operators that hold the logits of a few rows at a time."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from passes.chunk_rows import rewrite_rows
from passes.compat import schema_of
from passes.graph_pass import Pass, copy_graph_module
from passes.graphs.edit import erase_unread, new_call, on_stored_values
from passes.graphs.node_facts import is_pure
from passes.graphs.verify import VerifyError
from passes.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from passes.patterns.logits_path import as_rows, moved, other_size_readers
from passes.patterns.loops import ends_of_loops, roll_loops
from passes.patterns.loss_pattern import LossMatch, bytes_in_fp32, find_picked, losses, match_loss
from passes.patterns.row_program import RowProgram, programs
from passes.patterns.row_region import RowRegion, layer_of, row_region_of, row_seeds
from passes.rewrite_pattern import NoMatch, check_named, judged

aten = torch.ops.aten


@dataclass(frozen=True)
class FoundLoss:
    """A loss in a graph, and why `ChunkLoss` cannot rewrite it, where it cannot."""

    name: str
    """The name of its node; of the first of its nodes where several calls read the same logits."""
    reason: str = ""
    """Why it is left alone; empty if it can be rewritten."""
    logits_bytes: int | None = None
    """Bytes of its logits in fp32; None where it is left alone, or where a size is symbolic."""
    weight: str = ""
    """The name of the weight of its layer, for the mean or sum of a cross entropy that can be rewritten."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or 'computed in chunks'}"


def find_losses(graph_module: GraphModule) -> tuple[FoundLoss, ...]:
    """Returns the losses of an operator graph, in its order, each with the reason if `ChunkLoss` cannot rewrite it."""
    found = {}
    for loss, match, reason in _matches(_rolled(graph_module).graph):
        weight = ""
        if isinstance(match, LossMatch):
            logits, weight = match.path.nodes[-1].node, match.linear.weight.name
        elif match is not None:
            logits = next(iter(match[0].layers))
        found[loss] = FoundLoss(loss.name, reason, None if match is None else bytes_in_fp32(logits), weight)
    return tuple(found[loss] for loss in sorted(found))


def _rolled(graph_module: GraphModule) -> GraphModule:
    """Returns a graph in which each unrolled loop over rows of logits is one computation for all rows (`roll_loops`).
    Returns the graph as it is unless all of them can then be computed in chunks."""
    if not ends_of_loops(graph_module.graph):
        return graph_module
    rolled = copy_graph_module(graph_module)
    with on_stored_values(rolled.graph):
        made = set(roll_loops(rolled.graph))
    for _, match, _ in _matches(rolled.graph) if made else ():
        if isinstance(match, tuple):
            region, _ = match
            made -= {*region.inside, *region.results}
    return graph_module if made & {*row_seeds(rolled.graph, ())} else rolled


_Match: TypeAlias = LossMatch | tuple[RowRegion, list[RowProgram]]


def _matches(graph: Graph, names: Collection[str] | None = None) -> Iterator[tuple[Node, _Match | None, str]]:
    """Yields each loss with its match, or with None and the reason why it cannot be rewritten. Losses that are the mean
    or sum of a cross entropy come first. Then comes each part of the graph that computes anything else from rows of
    logits, with the first loss or `row_seeds` call in it. `names` limits both to calls of these names. The graph may be
    rewritten in between."""
    others, taken = {}, set[Node]()
    for loss, match, reason in judged(losses(graph), match_loss, names):
        if match is None:
            picked = find_picked(loss)
            others[loss if picked is None else picked.log_probabilities] = reason
        else:
            taken.update(step.node for step in match.path.nodes)
            yield loss, match, ""
    for seed in row_seeds(graph, taken):
        others.setdefault(seed, "")
    known = set[Node]()
    for seed in sorted(others):
        if seed in known or (names is not None and seed.name not in names):
            continue
        found: _Match | None = None
        reason = others[seed]
        try:
            layer = layer_of(seed)
            reason = ""
            region = row_region_of(*layer)
            known.update(region.inside, region.results)
            found = region, programs(region)
        except NoMatch as mismatch:
            reason = reason or str(mismatch)
        yield seed, found, reason


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Computes the cross entropy of a linear layer in chunks of rows, together with its gradients.

    The loss is `cross_entropy_loss`, `nll_loss` of a log_softmax, or the mean or sum of log probabilities picked at the
    targets; casts, scaling, a softcap and a bias become options of the operator. Whatever else is computed from each
    row of logits alone becomes a program of `memopt::linear_rows`, whose gradients come from logits that are computed
    once more. What only moves rows (views, slices, masks) is done to the layer's input instead of the logits. Logits
    that anything else reads are left alone: see `find_losses`. Results differ by rounding.

    Before:
        linear: f32[2, 8, 50] = aten.linear(hidden, weight)
        view: f32[16, 50] = aten.view(linear, [-1, 50])
        cross_entropy_loss: f32[] = aten.cross_entropy_loss(view, target)
    After:
        reshape: f32[16, 4] = aten.reshape(hidden, [-1, 4])
        linear_cross_entropy: f32[] = memopt.linear_cross_entropy(reshape, weight, None, target)
    """

    losses: frozenset[str] | None = None
    """Names of the losses to rewrite; None: all that can be."""
    rows: int | None = None
    """Rows of a chunk. None: an eighth of all, at most half of the layer's width or 512, whichever is more; half as
    many for `memopt::linear_rows`."""
    weight_in_backward: bool = False
    """Compute the weight's gradient in the backward, from recomputed logits: a fourth matmul, but the gradient is never
    held twice."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"ChunkLoss needs at least one row in a chunk, not rows={self.rows}; None lets it choose")

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph_module = _rolled(graph_module)
        graph = graph_module.graph
        options = {"rows": self.rows or 0, "weight_in_backward": self.weight_in_backward}
        with on_stored_values(graph):
            for loss, match, reason in _matches(graph, self.losses):
                if isinstance(match, tuple):
                    rewrite_rows(*match, self.rows or 0)
                elif match is not None:
                    _rewrite(match, options)
                elif self.losses is not None:
                    raise VerifyError(loss.name, reason, "name only losses that find_losses says can be rewritten")
        return graph_module

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        graph = _rolled(graph_module).graph
        known = {loss.name: "" for loss in (*losses(graph), *row_seeds(graph, ()))}
        mend = "give names that find_losses returns"
        check_named(self.losses or (), known, "it is no cross entropy of this graph", mend)


def _rewrite(match: LossMatch, options: dict[str, Any]) -> None:
    """Puts `memopt::linear_cross_entropy` in the place of one loss; `options` are those that are not in the graph."""
    source, class_dim = match.linear.hidden, match.path.nodes[-1].class_dim
    sources: dict[Node, Node] = {}
    """Per node between the layer and the loss: the layer's input, with its rows moved as that node's rows are."""
    for step in match.path.nodes:
        if step.moves_rows:
            with match.loss.graph.inserting_before(step.node):
                source = moved(step, source, match.linear.width)
        sources[step.node] = source
        for reader in other_size_readers(step.node, step.class_dim):
            reader.replace_input_with(step.node, source)
    with match.loss.graph.inserting_before(match.loss):
        result = _loss(match, as_rows(source, class_dim, match.linear.width, match.loss), options)
    match.loss.replace_all_uses_with(result)

    def is_erasable(node: Node) -> bool:
        goes = node is match.loss or node in sources or is_pure(node)
        return goes and node.op == "call_function" and node not in sources.values()

    erase_unread([match.loss], is_erasable)


def _loss(match: LossMatch, hidden: Node, further: dict[str, Any]) -> Node:
    loss, weight, target = match.loss, match.linear.weight, match.target
    if match.linear.transposed:
        weight = new_call(loss, aten.t.default, weight)
    if target.meta["val"].dim() != 1:
        target = new_call(loss, aten.reshape.default, target, [-1])
    if match.from_end:
        classes = match.linear.node.meta["val"].shape[-1]
        from_end = new_call(loss, aten.add.Tensor, target, classes)
        target = new_call(loss, aten.where.self, new_call(loss, aten.lt.Scalar, target, 0), from_end, target)
    options = {
        "reduction": match.reduction,
        "ignore_index": match.ignore_index,
        "label_smoothing": match.label_smoothing,
        "scale": match.path.formula.scale,
        "softcap": match.path.formula.softcap,
        **further,
    }
    arguments = schema_of(LINEAR_CROSS_ENTROPY).arguments
    usual = {option.name: option.default_value for option in arguments if option.kwarg_only}
    given = {name: value for name, value in options.items() if value != usual[name]}
    weights = () if match.class_weight is None else (match.class_weight,)
    result = new_call(loss, LINEAR_CROSS_ENTROPY, hidden, weight, match.bias, target, *weights, **given)
    if match.negated:
        result = new_call(loss, aten.neg.default, result)
    dtype = loss.meta["val"].dtype
    return result if result.meta["val"].dtype == dtype else new_call(loss, aten.to.dtype, result, dtype)

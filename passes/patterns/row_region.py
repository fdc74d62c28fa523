"""The part of a graph that treats each row of a linear layer's results alone, up to what has no class dimension.

Its values have one number for each class, in any dimension, and calls that only move rows may stand between them. It
ends in *results*, which reduce the classes or pick some of them: a few numbers for each row. Other values with classes
belong to it where nothing else reads them, another layer's logits among them: those of a teacher or a reference model.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.graphs.aliases import storages, storages_of
from passes.graphs.node_facts import arguments_of, is_random, named_dims, same_sizes
from passes.graphs.op_kinds import broadcasts, is_cast, mutated_arguments, op_name
from passes.patterns.logits_path import LogitsStep, row_move
from passes.patterns.loss_pattern import TOKEN_LOSSES, Linear, match_linear, picked_by_index
from passes.rewrite_pattern import NoMatch

LAYERS = frozenset({"linear", "matmul", "mm", "addmm"})
CLASS_LOSSES = frozenset({"kl_div", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
"""Losses that are computed for each class, and then reduced."""
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "logsumexp"})
"""Reductions that may be done over one dimension after the other."""
SAME = frozenset({"alias", "clone", "contiguous", "detach", "lift_fresh"})


@dataclass
class RowRegion:
    """The calls of a graph from one or several linear layers to the numbers that are computed from each row of their
    logits: the values with a dimension of classes, and the results, a few numbers for each row. A row of logits is what
    a layer computes from one row of its input, as of one token. `row_region_of` fills it."""

    inside: dict[Node, int] = field(default_factory=dict)
    """The values with classes, and the dimension of these."""
    layers: dict[Node, Linear] = field(default_factory=dict)
    """Those of the values that are a linear layer's results."""
    results: dict[Node, Node] = field(default_factory=dict)
    """Per result: the value with classes that it is computed from."""

    def path(self, node: Node) -> tuple[Node, tuple[LogitsStep, ...]]:
        """Returns the linear layer that `node`, a value with classes, is computed from, and the calls in between that
        move rows of its logits, in order."""
        steps: tuple[LogitsStep, ...] = ()
        while node not in self.layers:
            step = LogitsStep(node, self.inside[node])
            steps = (step, *steps) if step.moves_rows else steps
            node = next(source for source in node.all_input_nodes if source in self.inside)
        return node, steps


def row_seeds(graph: Graph, taken: Collection[Node]) -> Iterator[Node]:
    """Yields the calls of `log_softmax` and `logsumexp` from which a loss may be computed, if their input is logits.

    Left out are calls in `taken`, which belong to a loss that was matched already, and those that torch's cross entropy
    or `nll_loss` reads."""
    for node in graph.nodes:
        of_a_loss = any(op_name(user) in TOKEN_LOSSES for user in node.users)
        if op_name(node) in ("log_softmax", "logsumexp") and node not in taken and not of_a_loss:
            yield node


def layer_of(seed: Node) -> tuple[Node, int]:
    """Returns the linear layer whose logits a call such as `log_softmax`, `seed`, reads, and the dimension of the
    classes there. Raises `NoMatch` if there is none."""
    value: Any = seed.args[0]
    last = value.meta["val"].dim() - 1
    class_dim = min(1, last) if op_name(seed) in TOKEN_LOSSES else last
    if op_name(seed) in ("log_softmax", "logsumexp"):
        dims: Any = arguments_of(seed)["dim"]
        class_dim = (dims[0] if isinstance(dims, (list, tuple)) else dims) % (last + 1)
    return _layer_above(value, class_dim)


def row_region_of(layer: Node, class_dim: int) -> RowRegion:
    """Returns the `RowRegion` around a layer that `layer_of` returned. Raises `NoMatch` if anything else reads one of
    the values with classes, or if one is written over and read later through an alias."""
    region = RowRegion()
    _grow(region, layer, class_dim)
    _absorb(region)
    _check_writes(region)
    return region


def _layer_above(value: Node, class_dim: int) -> tuple[Node, int]:
    """As `layer_of`, for a value with classes in the dimension `class_dim`."""
    while op_name(value) not in LAYERS:
        above = next(_with_classes(value, class_dim), None)
        if above is None:
            raise NoMatch(f"the logits come from {op_name(value) or value.name}, not from a linear layer")
        value, class_dim = above
    if class_dim != value.meta["val"].dim() - 1:
        raise NoMatch(f"the classes of the loss are not the last dimension of the logits {value.name}")
    return value, class_dim


def _layer(node: Node) -> Linear:
    """Returns a linear layer whose results are rows of classes. Raises `NoMatch` for any other call."""
    linear = match_linear(node)
    if not all(isinstance(size, int) for size in linear.weight.meta["val"].shape):
        raise NoMatch("the weight of the linear layer has symbolic sizes")
    if node.meta["val"].dim() < 1 or not node.meta["val"].is_floating_point():
        raise NoMatch("the result of the linear layer is a scalar, or not floating-point")
    if linear.bias is not None and linear.bias.meta["val"].dim() != 1:
        raise NoMatch("the bias of the linear layer is not a vector with one number for each class")
    return linear


def _with_classes(node: Node, class_dim: int) -> Any:
    """Yields the inputs whose classes become those of a call's result, in `class_dim`, each with their dimension."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        for dim in range(value.dim()) if isinstance(value, torch.Tensor) else ():
            if class_dim_after(node, source, dim) == class_dim:
                yield source, dim


def _grow(region: RowRegion, node: Node, class_dim: int) -> None:
    """Adds a value, and what is computed from it. Raises `NoMatch` where anything else reads it."""
    pending = [(node, class_dim)]
    while pending:
        value, dim = pending.pop()
        if value in region.inside:
            continue
        region.inside[value] = dim
        if op_name(value) in LAYERS:
            region.layers[value] = _layer(value)
        for user in value.users:
            after = class_dim_after(user, value, dim)
            if user.op == "output":
                raise NoMatch("the logits are returned as well")
            if after is not None:
                pending.append((user, after))
            elif is_result(user, value, dim):
                region.results[user] = value
            elif op_name(user) != "sym_size":
                raise NoMatch(f"{value.name} is read by {user.name} as well")


def _absorb(region: RowRegion) -> None:
    """Adds other values with classes that the region reads. A value comes with all that is computed from its linear
    layer, if that can be added. Else it comes alone, if nothing but the region reads it."""
    pending = [*region.inside, *region.results]
    while pending:
        node = pending.pop()
        for source, dim in list(_others_with_classes(region, node)):
            before = {*region.inside, *region.results}
            trial = RowRegion(dict(region.inside), dict(region.layers), dict(region.results))
            try:
                _grow(trial, *_layer_above(source, dim))
                region.inside, region.layers, region.results = trial.inside, trial.layers, trial.results
            except NoMatch:
                alone = all(user in region.inside or user in region.results for user in source.users)
                if alone and next(_with_classes(source, dim), None) is not None:
                    region.inside[source] = dim
            pending += {*region.inside, *region.results} - before


def _others_with_classes(region: RowRegion, node: Node) -> Iterator[tuple[Node, int]]:
    """Yields the inputs of a value or result that have classes and are not in the region, each with their dimension."""
    value = region.results.get(node, node)
    shape, class_dim = value.meta["val"].shape, region.inside[value]
    for source in node.all_input_nodes:
        if source not in region.inside and isinstance(source.meta.get("val"), torch.Tensor):
            dim = next((dim for found, dim in _with_classes(node, class_dim) if found is source), None)
            if dim is None and node in region.results and same_sizes(source.meta["val"].shape, shape):
                dim = class_dim
            if dim is not None and source.op == "call_function":
                yield source, dim


def class_dim_after(node: Node, source: Node, class_dim: int) -> int | None:
    """Returns the dimension of the classes in the result of the call `node`, whose input `source` has the classes in
    dimension `class_dim`. None where the call does not treat each row alone, or its result has no classes."""
    value, before = node.meta.get("val"), source.meta["val"]
    if not isinstance(value, torch.Tensor) or node.op != "call_function":
        return None
    if node.args and node.args[0] is source:
        for dim in range(value.dim()):
            try:
                if row_move(node, dim) == (source, class_dim):
                    return dim
            except NoMatch:
                continue
    name = op_name(node)
    if name in ("softmax", "log_softmax"):
        over: Any = arguments_of(node)["dim"]
        return class_dim if over % before.dim() == class_dim else None
    same_device = before.device == value.device and not is_random(node)
    if not same_device or not same_sizes(value.shape, before.shape):
        return None
    if is_cast(node) or name in SAME or name in ("zeros_like", "ones_like", "full_like"):
        return class_dim
    by_class = name in CLASS_LOSSES and arguments_of(node)["reduction"] == 0
    by_element = by_class or broadcasts(node)
    numbers = [other for other in node.all_input_nodes if not isinstance(other.meta.get("val"), torch.Tensor)]
    written = mutated_arguments(node)
    return class_dim if by_element and not numbers and written in ((), (source,)) else None


def is_result(node: Node, source: Node, class_dim: int) -> bool:
    """Returns whether a call reduces or picks, for each row alone, classes of its input, in dimension `class_dim`."""
    name, before = op_name(node), source.meta["val"]
    if not name or not isinstance(node.meta.get("val"), torch.Tensor) or mutated_arguments(node):
        return False
    given = arguments_of(node)
    if name in TOKEN_LOSSES:
        first: Any = node.args[0]
        dims: int = first.meta["val"].dim()
        return isinstance(given["ignore_index"], int) and class_dim == min(1, dims - 1) and before.dim() == dims
    if name in CLASS_LOSSES:
        other: Any = node.args[1 if node.args[0] is source else 0]
        return bool(given["reduction"]) and same_sizes(other.meta["val"].shape, before.shape)
    if node.args[0] is not source:
        return False
    if name in REDUCTIONS:
        over = reduced(node)
        return class_dim in over and (name != "logsumexp" or len(over) == 1)
    if name in ("argmax", "argmin", "gather", "select"):
        at = given["dim"]
        rows = given.get("index")
        if name == "select" and isinstance(rows, Node):
            return False
        index = rows.meta["val"].shape if isinstance(rows, Node) else ()
        same = name != "gather" or all(
            same_sizes(index[dim : dim + 1], before.shape[dim : dim + 1])
            for dim in range(before.dim())
            if dim != class_dim
        )
        return at is not None and at % before.dim() == class_dim and same
    return name == "index" and picked_by_index(node) is not None


def reduced(node: Node) -> tuple[int, ...]:
    """Returns the dimensions that a call of `REDUCTIONS` reduces."""
    source: Any = node.args[0]
    return named_dims(arguments_of(node).get("dim"), source.meta["val"].dim())


def _check_writes(region: RowRegion) -> None:
    """Raises `NoMatch` where a value that is written over is read through an alias afterwards."""
    for node in region.inside:
        held = storages_of(mutated_arguments(node))
        for other in region.inside:
            if other < node and held & storages(other) and any(user > node for user in other.users):
                raise NoMatch(f"{node.name} writes to logits that are read later through an alias")

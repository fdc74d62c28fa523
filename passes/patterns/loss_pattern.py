"""Finds the losses of a graph that are the cross entropy of a linear layer, and says why others are not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.graphs.node_facts import arguments_of, same_sizes
from passes.graphs.op_kinds import dims_order, is_cast, op_name
from passes.patterns.logits_path import Path, walk_up
from passes.rewrite_pattern import NoMatch, check_unwritten

_SHAPES = frozenset({"squeeze", "view", "reshape", "flatten", "contiguous"})


@dataclass(frozen=True)
class _Picked:
    """`reduction(sign * log_probabilities picked at target)`."""

    pick: Node
    log_probabilities: Node
    target: Node
    """The targets: one element for each row of log probabilities, in their order."""
    reduction: str
    negative: bool
    """Whether the sign is minus, so that the value is the cross entropy and not its negative."""


def find_picked(loss: Node) -> _Picked | None:
    """Returns the match of a mean or sum of log probabilities that are picked at the targets (by `gather` or an index),
    which is a cross entropy written out; None for any other call."""
    if op_name(loss) not in ("mean", "sum") or len(loss.args) != 1 or loss.kwargs:
        return None
    negative = False
    node: Any = loss.args[0]
    while op_name(node) in _SHAPES | {"neg"}:
        negative ^= op_name(node) == "neg"
        node = node.args[0]
    if op_name(node) not in ("gather", "index"):
        return None
    source: Any = node.args[0]
    if op_name(source) != "log_softmax":
        return None
    target = _gathered(node, source) if op_name(node) == "gather" else picked_by_index(node)
    return _Picked(node, source, target, op_name(loss), negative) if target is not None else None


def _gathered(pick: Node, source: Node) -> Node | None:
    """Returns the index of a `gather(source, -1, index)` that picks one element of each row, or None."""
    index: Any = pick.args[2]
    dim: Any = pick.args[1]
    shape = source.meta["val"].shape
    one_each = dim % len(shape) == len(shape) - 1 and same_sizes(index.meta["val"].shape, (*shape[:-1], 1))
    return index if one_each else None


def picked_by_index(pick: Node) -> Node | None:
    """Returns `targets` if `pick` computes `source[arange(rows), targets]`, else None."""
    source: Any = pick.args[0]
    indices: Any = pick.args[1]
    value = source.meta["val"]
    if value.dim() != 2 or len(indices) != 2 or None in indices:
        return None
    rows, target = indices
    every = op_name(rows) == "arange" and len(rows.args) == 1
    same = all(same_sizes(index.meta["val"].shape, value.shape[:1]) for index in indices)
    whole = not (target.meta["val"].is_floating_point() or target.meta["val"].dtype.itemsize < 8)
    return target if every and same and whole else None


TOKEN_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
FINISHES = {1: "mean", 2: "sum"}
"""By the number that torch gives to a loss's `reduction`; 0 is none."""
_NONE = torch.iinfo(torch.int64).min
"""An `ignore_index` that no target has."""


@dataclass(frozen=True)
class Linear:
    """`hidden @ weight.T + bias`, computed by `linear`, `matmul`, `addmm` or the like."""

    node: Node
    hidden: Node
    """[..., width]"""
    weight: Node
    """[classes, width], or its transpose if `transposed`; before a cast to the dtype of `hidden`."""
    bias: Node | None
    transposed: bool

    @property
    def width(self) -> int:
        width: int = self.weight.meta["val"].shape[0 if self.transposed else 1]
        return width


@dataclass(frozen=True)
class LossMatch:
    """A loss, the linear layer that its logits come from, and the calls between them."""

    loss: Node
    linear: Linear
    path: Path
    target: Node
    class_weight: Node | None
    reduction: str
    ignore_index: int
    label_smoothing: float
    negated: bool = False
    """Whether the loss's node is the negative of the cross entropy."""
    from_end: bool = False
    """Whether negative targets count from the last class, as those of an index do."""

    @property
    def bias(self) -> Node | None:
        return self.path.formula.bias or self.linear.bias


def losses(graph: Graph) -> Iterator[Node]:
    """Yields the calls that may be the cross entropy of a linear layer, in the graph's order."""
    return (node for node in graph.nodes if op_name(node) in TOKEN_LOSSES or find_picked(node))


def match_loss(loss: Node) -> LossMatch:
    """Returns the operands and options of a cross entropy of a linear layer. Raises `NoMatch`, with the reason, if it
    cannot be computed in chunks."""
    picked = find_picked(loss)
    if picked is not None:
        return _match_picked(loss, picked)
    given = arguments_of(loss)
    value, target, reduction, ignore_index = (given[name] for name in ("self", "target", "reduction", "ignore_index"))
    if target.meta["val"].is_floating_point():
        raise NoMatch("the targets are probabilities, not classes")
    if reduction not in FINISHES:
        raise NoMatch("the loss function returns a loss for each target (reduction='none')")
    if not isinstance(ignore_index, int):
        raise NoMatch("ignore_index is a symbol")
    class_dim = min(1, value.meta["val"].dim() - 1)
    path = walk_up(value, class_dim, loss)
    linear = match_linear(path.nodes[0].node)
    smoothing = float(given.get("label_smoothing", 0.0))
    match = LossMatch(loss, linear, path, target, given["weight"], FINISHES[reduction], ignore_index, smoothing)
    if op_name(loss) != "cross_entropy_loss" and not path.formula.normalised:
        raise NoMatch("the input of nll_loss is not from log_softmax")
    return _checked(match)


def _match_picked(loss: Node, picked: _Picked) -> LossMatch:
    """Returns the match of a written-out cross entropy. It has no ignored target, and fails for an invalid one."""
    value = picked.log_probabilities
    node: Any = loss.args[0]
    while node is not value:
        if len(node.users) > 1:
            raise NoMatch(f"{node.name} is read by {', '.join(user.name for user in node.users)}, not the loss alone")
        node = node.args[0]
    path = walk_up(value, value.meta["val"].dim() - 1, picked.pick)
    linear = match_linear(path.nodes[0].node)
    negated, from_end = not picked.negative, op_name(picked.pick) == "index"
    return _checked(LossMatch(loss, linear, path, picked.target, None, picked.reduction, _NONE, 0.0, negated, from_end))


def _checked(match: LossMatch) -> LossMatch:
    _check_shapes(match)
    if match.path.returned:
        raise NoMatch("the logits are returned as well")
    # The operator reads its inputs where the loss is.
    inputs = [operand for operand in (match.linear.hidden, match.linear.weight, match.bias) if operand is not None]
    what = "an input of the linear layer before the loss is computed"
    check_unwritten(inputs, match.linear.node, match.loss, what)
    return match


def match_linear(node: Node) -> Linear:
    """Returns the linear layer that a node computes. Raises `NoMatch` for any other node."""
    name, args = op_name(node), node.args
    hidden: Any
    weight: Any
    if name == "linear":
        hidden, weight, bias = args[0], args[1], arguments_of(node)["bias"]
    elif name in ("matmul", "mm"):
        hidden, weight, bias = args[0], args[1], None
    elif name == "addmm" and not node.kwargs:
        bias, hidden, weight = args
    else:
        raise NoMatch(f"the logits come from {name or node.name}, not from a linear layer")
    transposed = name != "linear"
    if weight.meta["val"].dim() != 2:
        raise NoMatch("the logits are a product of two activations")
    if transposed and (turned := _turned(weight)) is not None:
        weight, transposed = turned, False
    return Linear(node, hidden, _uncast(weight, hidden), None if bias is None else _uncast(bias, hidden), transposed)


def _turned(weight: Node) -> Node | None:
    """Returns the matrix that a node is the transpose of, or None."""
    name = op_name(weight)
    turns = name == "numpy_T" or (name in ("t", "transpose", "permute") and dims_order(weight) == [1, 0])
    source: Any = weight.args[0] if turns else None
    return source


def _uncast(value: Node, hidden: Node) -> Node:
    """Returns a parameter before its cast to the dtype of `hidden`; the operator casts it, with an exact gradient."""
    source: Any = value.args[0] if is_cast(value) else None
    if source is None or value.meta["val"].dtype != hidden.meta["val"].dtype:
        return value
    before, after = source.meta["val"], value.meta["val"]
    widens = before.is_floating_point() and before.dtype.itemsize >= after.dtype.itemsize
    return source if widens and before.device == after.device else value


def _check_shapes(match: LossMatch) -> None:
    hidden, weight = match.linear.hidden.meta["val"], match.linear.weight.meta["val"]
    if not all(isinstance(size, int) for size in weight.shape):
        raise NoMatch("the weight of the linear layer has symbolic sizes")
    top = match.path.nodes[0]
    if top.class_dim != top.node.meta["val"].dim() - 1:
        raise NoMatch(f"the classes of the loss are not the last dimension of the logits {top.node.name}")
    if not hidden.is_floating_point() or hidden.dim() < 1:
        raise NoMatch("the input of the linear layer is a scalar, or not floating-point")
    bias = match.bias
    classes = weight.shape[1 if match.linear.transposed else 0]
    if bias is not None and tuple(bias.meta["val"].shape) != (classes,):
        raise NoMatch("the bias of the linear layer is not a vector with one number for each class")
    if match.path.formula.bias is not None and match.linear.bias is not None:
        raise NoMatch("a bias is added to the result of the linear layer, which adds one itself")


def bytes_in_fp32(logits: Node) -> int | None:
    """Returns the bytes that logits of any dtype take in fp32, or None if a size is symbolic."""
    value = logits.meta["val"]
    sizes = [size for size in value.shape if isinstance(size, int)]
    return 4 * torch.Size(sizes).numel() if len(sizes) == value.dim() else None

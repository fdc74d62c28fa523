"""Finds the losses of a graph that are the cross entropy of a linear layer, and says why others are not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.compat import schema_of
from passes.graphs.op_kinds import is_cast, op_name
from passes.patterns.logits_path import NoMatch, Path, walk_up
from passes.patterns.picked_loss import Picked, check_readers, find_picked
from passes.patterns.written_out import check_unwritten

_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
_REDUCTIONS = {1: "mean", 2: "sum"}
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

    @property
    def bias(self) -> Node | None:
        return self.path.formula.bias or self.linear.bias


def losses(graph: Graph) -> Iterator[Node]:
    """Yields the calls that may be the cross entropy of a linear layer, in order."""
    return (node for node in graph.nodes if op_name(node) in _LOSSES or find_picked(node))


def match_loss(loss: Node, *, drop_logits: bool = False) -> LossMatch:
    """Returns the operands and options of a loss. Raises `NoMatch`, with the reason, if it cannot go in chunks."""
    picked = find_picked(loss)
    if picked is not None:
        return _match_picked(loss, picked, drop_logits)
    value, target, class_weight, reduction, ignore_index, label_smoothing = _arguments(loss)
    if target.meta["val"].is_floating_point():
        raise NoMatch("its targets are probabilities, not classes")
    if reduction not in _REDUCTIONS:
        raise NoMatch("it gives a loss for each target (reduction='none')")
    if not isinstance(ignore_index, int):
        raise NoMatch("its ignore_index is a symbol")
    class_dim = min(1, value.meta["val"].dim() - 1)
    path = walk_up(value, class_dim, loss)
    linear = _linear(path.top)
    match = LossMatch(
        loss, linear, path, target, class_weight, _REDUCTIONS[reduction], ignore_index, float(label_smoothing)
    )
    if op_name(loss) != "cross_entropy_loss" and not path.formula.normalised:
        raise NoMatch("its input is not from log_softmax")
    return _checked(match, drop_logits)


def _match_picked(loss: Node, picked: Picked, drop_logits: bool) -> LossMatch:
    """Returns the match of a cross entropy that is written out. It ignores no target and fails for an invalid one."""
    check_readers(picked, loss)
    value = picked.log_probabilities
    path = walk_up(value, value.meta["val"].dim() - 1, picked.pick)
    linear = _linear(path.top)
    match = LossMatch(loss, linear, path, picked.target, None, picked.reduction, _NONE, 0.0, not picked.negative)
    return _checked(match, drop_logits)


def _checked(match: LossMatch, drop_logits: bool) -> LossMatch:
    _check_shapes(match)
    if match.path.returned and not drop_logits:
        raise NoMatch("its logits are returned as well")
    _check_writes(match)
    return match


def _arguments(loss: Node) -> tuple[Node, Node, Node | None, int, Any, float]:
    """Returns input, target, class weight, reduction, ignored index and label smoothing of a loss."""
    target: Any = loss.target
    names = (argument.name for argument in schema_of(target).arguments)
    given = dict(zip(names, loss.args, strict=False)) | loss.kwargs
    smoothing = given.get("label_smoothing", 0.0)
    weight, reduction, ignored = given.get("weight"), given.get("reduction", 1), given.get("ignore_index", -100)
    return given["self"], given["target"], weight, reduction, ignored, smoothing


def _linear(node: Node) -> Linear:
    name, args = op_name(node), node.args
    hidden: Any
    weight: Any
    if name == "linear":
        hidden, weight, bias = args[0], args[1], _node(node, 2, "bias")
    elif name in ("matmul", "mm"):
        hidden, weight, bias = args[0], args[1], None
    elif name == "addmm" and not node.kwargs:
        (bias, hidden, weight) = args  # type: ignore[assignment]
    else:
        raise NoMatch(f"its logits come from {name or node.name}, not from a linear layer")
    transposed = name != "linear"
    if weight.meta["val"].dim() != 2:
        raise NoMatch("its logits are a product of two activations")
    if transposed and (turned := _turned(weight)) is not None:
        weight, transposed = turned, False
    return Linear(node, hidden, _uncast(weight, hidden), None if bias is None else _uncast(bias, hidden), transposed)


def _node(call: Node, position: int, name: str) -> Node | None:
    value: Any = call.args[position] if len(call.args) > position else call.kwargs.get(name)
    return value


def _turned(weight: Node) -> Node | None:
    """Returns the matrix that a node is the transpose of, or None."""
    turns = op_name(weight) in ("t", "numpy_T") or (
        op_name(weight) in ("transpose", "permute")
        and {argument % 2 for argument in _numbers(weight.args[1:])} == {0, 1}
    )
    source: Any = weight.args[0] if turns else None
    return source


def _numbers(arguments: Any) -> list[int]:
    return [member for group in arguments for member in (group if isinstance(group, (tuple, list)) else [group])]


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
        raise NoMatch("its weight has symbolic sizes")
    if not hidden.is_floating_point() or hidden.dim() < 1:
        raise NoMatch("its hidden values are no floating-point rows")
    bias = match.bias
    classes = weight.shape[1 if match.linear.transposed else 0]
    if bias is not None and tuple(bias.meta["val"].shape) != (classes,):
        raise NoMatch("its bias has not one number for each class")
    if match.path.formula.bias is not None and match.linear.bias is not None:
        raise NoMatch("it has two biases")


def _check_writes(match: LossMatch) -> None:
    """Raises `NoMatch` where an input is written to before the loss: the operator reads its inputs there."""
    inputs = [operand for operand in (match.linear.hidden, match.linear.weight, match.bias) if operand is not None]
    what = "an input of the linear layer before the loss is computed"
    check_unwritten(inputs, match.linear.node, match.loss, what)


def logits_bytes(match: LossMatch) -> int | None:
    """Returns the bytes of the loss's logits in fp32, or None if a size is symbolic."""
    value = match.path.nodes[-1].node.meta["val"]
    sizes = [size for size in value.shape if isinstance(size, int)]
    return 4 * torch.Size(sizes).numel() if len(sizes) == value.dim() else None

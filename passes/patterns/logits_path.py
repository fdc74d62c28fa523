"""The calls between a linear layer and a loss: whether they keep rows of logits apart, and what they compute."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from passes.compat import overload_name, statically_known_true
from passes.graphs.edit import new_call
from passes.graphs.node_facts import arguments_of, named_dims
from passes.graphs.op_kinds import dims_order, is_cast, op_name
from passes.rewrite_pattern import NoMatch

_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten"})
_SAME = frozenset({"alias", "contiguous", "clone"})


@dataclass(frozen=True)
class LogitsStep:
    """A call between the linear layer and the loss, with the dimension of its result that holds the classes."""

    node: Node
    class_dim: int

    @property
    def moves_rows(self) -> bool:
        """Whether the call moves, picks or copies rows, so that the rewrite makes it on the linear layer's input."""
        moved = row_move(self.node, self.class_dim)
        return moved is not None and not takes_all(self.node, self.class_dim)


@dataclass(frozen=True)
class _Formula:
    """The function of the logits `x` that the loss is given: `softcap * tanh(scale * (x + bias))`. It is `scale * (x +
    bias)` where `softcap` is 0. If `normalised`, a log_softmax follows."""

    scale: float = 1.0
    softcap: float = 0.0
    bias: Node | None = None
    normalised: bool = False


@dataclass(frozen=True)
class Path:
    """The calls from a linear layer to a loss, and the function of the logits that they compute together."""

    nodes: tuple[LogitsStep, ...]
    """In order: the first is the linear layer, the last is the loss's input."""
    returned: bool
    """Whether the graph returns one of them, or its detached value."""
    formula: _Formula


def walk_up(value: Node, class_dim: int, reader: Node) -> Path:
    """Returns the path from the loss's input, `value`, back to the call that computes the logits: the first that
    neither moves rows nor is a cast, a scaling, a bias, tanh or log_softmax.

    `class_dim` is the dimension of the classes in `value`, and `reader` the call that reads `value` for the loss.
    Raises `NoMatch` where a call splits the classes or picks among them, where the calls together are no formula that
    `memopt::linear_cross_entropy` has, or where something else reads a value of the path."""
    steps: list[LogitsStep] = []
    returned, formula = False, _Formula()
    while True:
        returned |= _is_returned(value, reader)
        steps.append(LogitsStep(value, class_dim))
        above = _step(value, class_dim, formula)
        if above is None:
            return Path(tuple(reversed(steps)), returned, formula)
        reader, (value, class_dim, formula) = value, above


def _step(node: Node, class_dim: int, formula: _Formula) -> tuple[Node, int, _Formula] | None:
    """Returns the input of a call, the dimension of the classes in it, and the formula of the call followed by
    `formula`; None where the call is no step between a layer and a loss. Raises `NoMatch` where it splits or picks
    classes, or `memopt::linear_cross_entropy` cannot compute the formula."""
    name = op_name(node).removesuffix("_")
    source: Any = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    factor, terms = _factor(node), _sum(node) if name == "add" else None
    if name == "add" and terms is None:
        return None
    if name == "log_softmax":
        dim: Any = node.args[1]
        if dim % node.meta["val"].dim() != class_dim:
            raise NoMatch("the log_softmax is not over the classes")
        if replace(formula, normalised=False) != _Formula():
            raise NoMatch("the log probabilities are changed before the loss reads them")
        return source, class_dim, _Formula(normalised=True)
    if (factor is not None or name in ("add", "tanh")) and formula.bias is not None:
        raise NoMatch(f"a bias is added to the logits after {node.name}")
    if factor is not None:
        return source, class_dim, replace(formula, scale=formula.scale * factor)
    if terms is not None:
        return terms[0], class_dim, replace(formula, bias=terms[1])
    if name == "tanh":
        if formula.softcap:
            raise NoMatch("the logits go through tanh twice")
        return source, class_dim, replace(formula, scale=1.0, softcap=formula.scale)
    if name in _SAME or _is_float_cast(node):
        return source, class_dim, formula
    moved = row_move(node, class_dim)
    return None if moved is None else (*moved, formula)


def row_move(node: Node, class_dim: int) -> tuple[Node, int] | None:
    """Returns the input of a call that moves, picks or copies rows of classes, and the dimension of the classes there.

    None for another call. Raises `NoMatch` for one that splits the classes, or picks among them."""
    name, source = op_name(node), node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    before: Any = source.meta.get("val")
    after: Any = node.meta["val"]
    if name in _VIEWS and overload_name(node.target) != "dtype":
        if class_dim == after.dim() - 1 and statically_known_true(before.shape[-1] == after.shape[-1]):
            return source, before.dim() - 1
        raise NoMatch(f"{node.name} splits the classes")
    if name in ("slice", "select", "index_select"):
        return _picked(node, class_dim)
    order = dims_order(node) if name in ("transpose", "permute") else None
    if order is not None:
        return source, order[class_dim]
    if name == "index":
        indices: Any = node.args[1]
        if class_dim != after.dim() - 1 or None in indices or _indexed(indices) >= before.dim():
            raise NoMatch(f"{node.name} picks among the classes")
        return source, before.dim() - 1
    if name == "unsqueeze":
        new: Any = node.args[1]
        if new % after.dim() == class_dim:
            raise NoMatch(f"{node.name} makes the dimension that the loss takes for the classes")
        return source, class_dim - (new % after.dim() < class_dim)
    return None


def keeps_order(step: LogitsStep) -> bool:
    """Whether a call that moves rows keeps all of them in order, as views and moves of the class dimension do."""
    order = dims_order(step.node)
    if order is None:
        return op_name(step.node) in _VIEWS | {"unsqueeze"}
    rows = [dim for at, dim in enumerate(order) if at != step.class_dim]
    return rows == sorted(rows)


def moved(step: LogitsStep, source: Node, width: int) -> Node:
    """Returns a new call that does to `source` what the call of `step` does to rows of classes; `source` has `width`
    columns in place of the classes. It is inserted at the graph's insertion point."""
    node = step.node
    arguments: list[Any] = [source, *node.args[1:]]
    target: Any = node.target
    if op_name(node) in ("view", "reshape", "_unsafe_view"):
        sizes: Any = node.args[1]
        target, arguments[1] = torch.ops.aten.reshape.default, [*sizes[:-1], width]
    options: dict[str, Any] = dict(node.kwargs)
    return new_call(node, target, *arguments, **options)


def as_rows(source: Node, class_dim: int | None, width: int, like: Node) -> Node:
    """Returns a value as [rows, width], by new calls like `like`. `class_dim` has the size `width`; None: the last."""
    dims = source.meta["val"].dim()
    if class_dim is not None and class_dim != dims - 1:
        source = new_call(like, torch.ops.aten.movedim.int, source, class_dim, -1)
    return source if dims == 2 else new_call(like, torch.ops.aten.reshape.default, source, [-1, width])


def other_size_readers(node: Node, class_dim: int) -> list[Node]:
    """Replaces calls that read a value's size in the dimension `class_dim` by it; returns those that read others."""
    value, others = node.meta["val"], list[Node]()
    for reader in [user for user in node.users if op_name(user) == "sym_size"]:
        dim: Any = reader.args[1]
        if dim % value.dim() == class_dim:
            reader.replace_all_uses_with(value.shape[class_dim])
            reader.graph.erase_node(reader)
        else:
            others.append(reader)
    return others


def _indexed(indices: Any) -> int:
    """Returns how many dimensions are indexed; a mask indexes as many dimensions as it has."""
    masks = (torch.bool, torch.uint8)
    return sum(index.meta["val"].dim() if index.meta["val"].dtype in masks else 1 for index in indices)


def _picked(node: Node, class_dim: int) -> tuple[Node, int]:
    """Returns what a `slice`, `select` or `index_select` picks rows from, and the dimension of the classes in that,
    which is `class_dim` in the result. Raises `NoMatch` if it picks among the classes."""
    source: Any = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    dim = _selected(node)
    if op_name(node) == "select":
        return source, class_dim + (dim <= class_dim)
    if dim == class_dim and not statically_known_true(before.shape[dim] == after.shape[dim]):
        raise NoMatch(f"{node.name} picks among the classes")
    return source, class_dim


def _selected(node: Node) -> int:
    """The dimension that a `slice`, `select` or `index_select` picks from."""
    source: Any = node.args[0]
    (dim,) = named_dims(arguments_of(node)["dim"], source.meta["val"].dim())
    return dim


def takes_all(node: Node, class_dim: int) -> bool:
    """Whether a call that `row_move` accepts is a slice that takes all classes of all rows."""
    return op_name(node) == "slice" and _selected(node) == class_dim


def _factor(node: Node) -> float | None:
    """Returns the number by which a call multiplies its first argument, or None for another call."""
    name = op_name(node).removesuffix("_")
    if name not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return None
    number = node.args[1]
    if type(number) not in (int, float) or not isinstance(node.args[0], Node):
        return None
    value = float(number)  # type: ignore[arg-type]
    return value if name == "mul" else 1.0 / value if value else None


def _sum(node: Node) -> tuple[Node, Node] | None:
    """Returns logits and bias, for a call that adds them; None for any other call."""
    one, other = (argument if isinstance(argument, Node) else None for argument in node.args[:2])
    if one is None or other is None or node.kwargs:
        return None
    logits, bias = (one, other) if one.meta["val"].dim() >= other.meta["val"].dim() else (other, one)
    return (logits, bias) if bias.meta["val"].dim() == 1 and logits.meta["val"].dim() > 1 else None


def _is_float_cast(node: Node) -> bool:
    source: Any = node.args[0]
    if not is_cast(node):
        return False
    before, after = source.meta["val"], node.meta["val"]
    return before.is_floating_point() and after.is_floating_point() and before.device == after.device


def _is_returned(node: Node, reader: Node) -> bool:
    """Returns whether the graph returns a value of the path. Raises `NoMatch` for one that anything else reads."""
    returned = False
    for user in node.users:
        detached = op_name(user) in ("detach", "alias") and all(item.op == "output" for item in user.users)
        if user.op == "output" or (detached and user is not reader):
            returned = True
        elif user is not reader and op_name(user) != "sym_size":
            raise NoMatch(f"{node.name} is read by {user.name} as well")
    return returned

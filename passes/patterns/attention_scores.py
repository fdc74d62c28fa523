"""The steps between Q Kᵀ and the softmax of an attention: scaling, adding a mask, filling masked scores."""

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.fx import Node

from passes.graphs.op_kinds import is_cast, op_name
from passes.patterns.logits_path import NoMatch

PRODUCTS = frozenset({"matmul", "bmm"})
PASS_ON = frozenset({"alias", "contiguous", "clone"})


@dataclass(frozen=True)
class Scale:
    """The scores are multiplied by a number."""

    by: float


@dataclass(frozen=True)
class Add:
    """A tensor is added to the scores."""

    mask: Node


@dataclass(frozen=True)
class Fill:
    """Scores are replaced by a number where the bool `mask` is `where`."""

    mask: Node
    where: bool
    number: float


ScoreStep: TypeAlias = Scale | Add | Fill


def only_reader(node: Node) -> Node:
    readers = list(node.users)
    returned = any(reader.op == "output" for reader in readers)
    if len(readers) != 1 or returned:
        others = "returned" if returned else f"read by {', '.join(reader.name for reader in readers)}"
        raise NoMatch(f"{node.name} is {others} as well")
    return readers[0]


def walk_up_scores(node: Node, reader: Node) -> tuple[Node, list[ScoreStep]]:
    """Returns the node of Q Kᵀ, and the steps from there to the softmax, last first. Raises `NoMatch`."""
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
        raise NoMatch(f"its scores come from {name or node.name}, not from a product of queries and keys")
    scores, steps = walk_up_scores(first, node)
    return scores, [step, *steps]


def _added(node: Node) -> tuple[Node, list[ScoreStep]]:
    """Returns the scores and the tensor of a sum, in whichever order they are added. Raises `NoMatch`."""
    mismatch = NoMatch(f"{node.name} adds no tensor to scores")
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

"""Cross entropy that is written out as the mean or sum of the log probabilities that are picked at the targets."""

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from passes.compat import statically_known_true
from passes.graphs.op_kinds import op_name
from passes.patterns.logits_path import NoMatch

_SHAPES = frozenset({"squeeze", "view", "reshape", "flatten", "contiguous"})


@dataclass(frozen=True)
class Picked:
    """`reduction(sign * log_probabilities picked at target)`."""

    pick: Node
    log_probabilities: Node
    target: Node
    """The targets: one element for each row of log probabilities, in their order."""
    reduction: str
    negative: bool
    """Whether the sign is minus, so that the value is the cross entropy and not its negative."""


def find_picked(loss: Node) -> Picked | None:
    """Returns the match of a mean or sum that is written like a cross entropy; None for any other call."""
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
    target = _gathered(node, source) if op_name(node) == "gather" else _indexed(node, source)
    return Picked(node, source, target, op_name(loss), negative) if target is not None else None


def check_readers(picked: Picked, loss: Node) -> None:
    """Raises `NoMatch` where anything else reads the picked log probabilities."""
    node: Any = loss.args[0]
    while node is not picked.log_probabilities:
        if len(node.users) > 1:
            raise NoMatch(f"{node.name} is read by {', '.join(user.name for user in node.users)}")
        node = node.args[0]


def _gathered(pick: Node, source: Node) -> Node | None:
    """Returns the index of a `gather(source, -1, index)` that picks one element of each row, or None."""
    index: Any = pick.args[2]
    dim: Any = pick.args[1]
    given, expected = index.meta["val"].shape, source.meta["val"].shape
    rows = len(given) == len(expected) and dim % len(expected) == len(expected) - 1
    one_each = rows and all(
        statically_known_true(one == other) for one, other in zip(given, (*expected[:-1], 1), strict=True)
    )
    return index if one_each else None


def _indexed(pick: Node, source: Node) -> Node | None:
    """Returns the targets of `source[arange(rows), targets]`, or None."""
    indices: Any = pick.args[1]
    value = source.meta["val"]
    if value.dim() != 2 or len(indices) != 2 or None in indices:
        return None
    rows, target = indices
    every = op_name(rows) == "arange" and len(rows.args) == 1
    sizes = (rows.meta["val"].shape, target.meta["val"].shape)
    same = all(len(size) == 1 and statically_known_true(size[0] == value.shape[0]) for size in sizes)
    whole = not (target.meta["val"].is_floating_point() or target.meta["val"].dtype.itemsize < 8)
    return target if every and same and whole else None

"""What passes share that put one operator in the place of a formula that is written out."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Node

from passes.compat import statically_known_true
from passes.graphs.aliases import storages
from passes.graphs.edit import new_call
from passes.graphs.op_kinds import is_cast, mutated_arguments, op_name
from passes.patterns.logits_path import NoMatch


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def check_only_read_by(inner: Collection[Node], readers: Collection[Node], like: Node) -> None:
    """Raises `NoMatch` where anything but `readers` reads one of the inner values; a size that is one of `like`'s does
    not count."""
    for node in inner:
        value = node.meta["val"]
        sized = isinstance(value, torch.Tensor) and same_sizes(value.shape, like.meta["val"].shape)
        for user in node.users:
            if user not in readers and not (sized and op_name(user) == "sym_size"):
                read = "returned" if user.op == "output" else f"read by {user.name}"
                raise NoMatch(f"{node.name} is {read} as well")


def check_unwritten(
    values: Collection[Node], first: Node, last: Node, what: str = "what it is computed from before its end"
) -> None:
    """Raises `NoMatch` where a call behind `first`, up to `last`, writes to the memory of one of the values.

    `what` names the values in the message.
    """
    held = frozenset[Any]().union(*(storages(each) for each in values))
    node = first
    while node is not last:
        node = node.next
        if any(storages(each) & held for each in mutated_arguments(node)):
            raise NoMatch(f"{node.name} writes to {what}")


def call_before(place: Node, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Returns `new_call(like, target, ...)`, made in front of `place`."""
    with place.graph.inserting_before(place):
        return new_call(like, target, *args, **kwargs)


def erase_inner(inner: Collection[Node], like: Node) -> None:
    """Erase those of the inner calls that nobody reads any more, with the constants and casts that were made for them;
    what reads their sizes reads those of `like`."""
    pending = sorted(inner)
    erased: set[Node] = set()
    while pending:
        node = pending.pop()
        for user in [each for each in node.users if op_name(each) == "sym_size" and node in inner]:
            user.replace_input_with(node, like)
        if node.users or node is like or node in erased or node.op not in ("call_function", "get_attr"):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        pending += [each for each in sources if is_cast(each) or each.op == "get_attr" or _is_scalar(each)]


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0

"""Helpers of the passes that replace a formula that is written out by one operator."""

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
    """Returns whether two shapes are known to be equal."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def check_only_read_by(inner: Collection[Node], readers: Collection[Node], like: Node) -> None:
    """Raises `NoMatch` where anything but `readers` reads one of the inner values.

    Reading a size does not count if the value is as large as `like`.
    """
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
    held = frozenset[Any]().union(*(storages(value) for value in values))
    node = first
    while node is not last:
        node = node.next
        if any(storages(argument) & held for argument in mutated_arguments(node)):
            raise NoMatch(f"{node.name} writes to {what}")


def call_before(place: Node, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Returns `new_call(like, target, ...)`, made in front of `place`."""
    with place.graph.inserting_before(place):
        return new_call(like, target, *args, **kwargs)


def erase_inner(inner: Collection[Node], like: Node) -> None:
    """Erases the inner calls that nothing reads any more, with the constants and casts that only they read.

    Calls that read their sizes read those of `like` instead.
    """
    pending = sorted(inner)
    erased: set[Node] = set()
    while pending:
        node = pending.pop()
        for user in [measure for measure in node.users if op_name(measure) == "sym_size" and node in inner]:
            user.replace_input_with(node, like)
        if node.users or node is like or node in erased or node.op not in ("call_function", "get_attr"):
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        pending += [source for source in sources if is_cast(source) or source.op == "get_attr" or _is_scalar(source)]


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0

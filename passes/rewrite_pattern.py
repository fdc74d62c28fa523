"""What passes that replace patterns share: a base class for small patterns, and tools for large ones.

A large pattern has a matcher, a function of a node: it returns a match, or None where nothing looks like the pattern,
and raises `NoMatch`, with the reason, where something does that must not be replaced.
"""

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.fx import GraphModule, Node

from passes.compat import in_own_thread
from passes.graph_pass import Pass
from passes.graphs.aliases import storages_of
from passes.graphs.edit import erase_unread, new_call, on_stored_values, replace_node
from passes.graphs.node_facts import attribute_of, same_sizes
from passes.graphs.op_kinds import is_cast, mutated_arguments, op_name
from passes.graphs.verify import VerifyError

Data = TypeVar("Data")
Match = TypeVar("Match")


class NoMatch(Exception):
    """Raised where a part of a graph is not the pattern that a pass looks for. The message is the reason, and follows
    the name of a node: "softmax: the softmax of attention is not over the keys"."""


@dataclass(frozen=True)
class Found:
    """A call of a graph that looks like the pattern of a pass, and why the pass cannot rewrite it, where it cannot."""

    name: str
    """The name of its node: attention's softmax, the root that a norm divides by, an activation's tanh or erf."""
    reason: str = ""
    """Why it is left alone; empty if it can be rewritten."""
    kind: str = ""
    """The replacement, where the pass has several: "gelu", "gelu_tanh" (its approximation) or "silu"."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason or ' into '.join(filter(None, ('fused', self.kind)))}"


@dataclass(frozen=True)
class RewritePattern(Pass, Generic[Data]):
    """A pass that replaces calls one by one. A subclass says which (`match`) and by what (`replace`).

    Calls are visited in the graph's order, each after all replacements before it. Calls that `replace` makes are not
    visited. Pure calls that only the replaced call read are erased with it.

    Before:
        pow_1: f32[4] = aten.pow.Tensor_Scalar(x, 2)
    After a pattern whose `match` returns `args[0]` of squares, and whose `replace` returns `new_call(node, mul, x, x)`:
        mul: f32[4] = aten.mul.Tensor(x, x)
    """

    @abc.abstractmethod
    def match(self, node: Node) -> Data | None:
        """Returns the data that `replace` needs of the pattern that ends at this call; None or False for no pattern.

        Must not change the graph."""

    @abc.abstractmethod
    def replace(self, node: Node, found: Data) -> Node:
        """Returns the node whose value all users of `node` read from now on; or `node` itself, which may be changed.

        `found` is what `match` returned. New calls are made by `new_call` and inserted before `node`."""

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        with on_stored_values(graph):
            for node in graph.nodes:
                found = self.match(node) if node.op == "call_function" else None
                if found is None or found is False:
                    continue
                with graph.inserting_before(node):
                    replacement = self.replace(node, found)
                if not isinstance(replacement, Node):
                    problem = f"replace returned {type(replacement).__name__} for this node"
                    raise VerifyError(node.name, problem, "return the node that replaces it, or this node itself")
                if replacement is not node:
                    sources = node.all_input_nodes
                    replace_node(node, replacement)
                    erase_unread(sources)
        return graph_module


def judged(
    nodes: Iterable[Node], match: Callable[[Node], Match | None], names: Collection[str] | None = None
) -> Iterator[tuple[Node, Match | None, str]]:
    """Yields (node, match, "") for each node that `match` accepts, (node, None, reason) for one that raises `NoMatch`,
    and (node, None, "") for one that it returns None for. With `names`, only nodes with these names are tried.

    Each node is matched when it is requested, so that the graph may be rewritten in between."""
    for node in list(nodes):
        if names is None or node.name in names:
            found, reason = None, ""
            try:
                found = match(node)
            except NoMatch as mismatch:
                reason = str(mismatch)
            yield node, found, reason


def check_named(names: Collection[str], reasons: Mapping[str, str], unknown: str, mend: str) -> None:
    """Raises `VerifyError` if one of the calls in `names` cannot be replaced. `reasons` has, for each call that the
    pass looks at, why it cannot be replaced, or "" if it can.

    In the message, `unknown` is the reason for a name that is not in `reasons`; `mend` says what to do."""
    for name in sorted(names):
        if reason := reasons.get(name, unknown):
            raise VerifyError(name, reason, mend)


def check_only_read_by(inner: Collection[Node], readers: Collection[Node], like: Node) -> None:
    """Raises `NoMatch` where anything but `readers` reads one of the values `inner`, or the graph returns one.

    Calls that only read a size of a value are allowed where the value has the shape of `like`."""
    for node in inner:
        value = node.meta["val"]
        sized = isinstance(value, torch.Tensor) and same_sizes(value.shape, like.meta["val"].shape)
        for user in node.users:
            if user not in readers and not (sized and op_name(user) == "sym_size"):
                read = "returned" if user.op == "output" else f"read by {user.name}"
                raise NoMatch(f"{node.name} is {read} as well")


def check_unwritten(
    values: Collection[Node], first: Node, last: Node, what: str = "an input of the pattern before its last call"
) -> None:
    """Raises `NoMatch` where a call after `first`, up to `last`, writes to the memory of one of the values.

    `what` names the values in the message."""
    held = storages_of(values)
    node = first
    while node is not last:
        node = node.next
        if storages_of(mutated_arguments(node)) & held:
            raise NoMatch(f"{node.name} writes to {what}")


SAME = frozenset({"alias", "clone", "contiguous", "lift_fresh_copy"})
"""Calls whose result has the numbers of their argument."""
_EXPONENTS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""The power to which each of these calls raises a constant."""


def constant(value: Any) -> float | None:
    """Returns a number, given as a Python number or as a constant tensor of one element; None for anything else."""
    if type(value) in (int, float):
        return float(value)
    if not isinstance(value, Node) or any(
        value in mutated_arguments(user) and op_name(user) != "detach_" for user in value.users
    ):
        return None
    name = op_name(value)
    if value.op == "get_attr":
        held = attribute_of(value)
        known = isinstance(held, torch.Tensor) and held.numel() == 1 and not held.requires_grad
        return float(in_own_thread(held.item)) if known and not hasattr(held, "fake_mode") else None
    if name in ("full", "scalar_tensor") and value.meta["val"].dim() == 0:
        return constant(value.args[-1])
    if name in SAME | {"detach", "detach_", *_EXPONENTS} or is_cast(value):
        number = constant(value.args[0])
        if number is None or name not in _EXPONENTS:
            return number
        return float(number ** _EXPONENTS[name]) if number > 0 else None
    return None


def call_before(place: Node, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Returns `new_call(like, target, ...)`, inserted before `place`."""
    with place.graph.inserting_before(place):
        return new_call(like, target, *args, **kwargs)


def erase_inner(inner: Collection[Node], like: Node) -> None:
    """Erases calls of a match, `inner`, that nothing reads any more, and constants and casts that only they read.

    Calls that read the size of one of `inner` read that of `like` instead."""
    for node in inner:
        for user in [measure for measure in node.users if op_name(measure) == "sym_size"]:
            user.replace_input_with(node, like)

    def is_erasable(node: Node) -> bool:
        goes = node in inner or is_cast(node) or node.op == "get_attr" or _is_scalar(node)
        return goes and node is not like and node.op in ("call_function", "get_attr")

    erase_unread(sorted(inner), is_erasable)


def _is_scalar(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0

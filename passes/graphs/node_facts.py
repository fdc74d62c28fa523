"""What a pass may know about a node without running it: whether it is pure, random, or part of the backward.

Purity is a list of what is known to be pure, not of what is known to be impure: a custom operator may draw random
numbers or print, and nothing in its schema says so. What is not known stays where it is.
"""

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.compat import free_unbacked_symbols, schema_of

OPERATOR_OVERLOAD: Any = type(torch.ops.aten.add.Tensor)
"""The class of `aten.add.Tensor` and its like, taken from an instance because it has no public name."""

_PURE_NAMESPACES = frozenset({"aten", "prims"})

# Of our own, what has no state: the same arguments give the same bits.
_PURE_OURS = frozenset(f"memopt::fp8_{name}" for name in ("quantize", "quantize_by", "dequantize", "matmul", "linear"))

_PURE_PYTHON = frozenset(
    {
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.neg,
        operator.pow,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.and_,
        operator.or_,
        *(getattr(torch, name) for name in dir(torch) if name.startswith("sym_")),
    }
)


def is_random(node: Node) -> bool:
    """True if the operator draws from a random generator."""
    target: Any = node.target
    return isinstance(target, OPERATOR_OVERLOAD) and torch.Tag.nondeterministic_seeded in target.tags


def is_tangent(node: Node) -> bool:
    """True for the inputs of a joint graph that are the gradients of its outputs."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def is_pure(node: Node) -> bool:
    """True if the node may be removed when unused: it writes nothing, draws nothing at random, asserts nothing.

    Collectives, custom operators (but for our own that are known to be) and higher-order operators count as impure.
    """
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target: Any = node.target
    if isinstance(target, OPERATOR_OVERLOAD):
        known = target.namespace in _PURE_NAMESPACES or schema_of(target).name in _PURE_OURS
        return known and not is_random(node) and not node.is_impure(impure_random=False)
    return target in _PURE_PYTHON


def may_write(node: Node) -> bool:
    """True if the call may write to its arguments, or to anything else that a later call reads."""
    if node.op in ("placeholder", "output") or is_pure(node):
        return False
    return not is_random(node) or node.is_impure(impure_random=False)


def binds_new_symbols(node: Node) -> bool:
    """True if the result's sizes or value depend on data: each call stands for symbols of its own."""
    found = _unbacked_symbols(node.meta.get("val"))
    return bool(found.difference(*(_unbacked_symbols(each.meta.get("val")) for each in node.all_input_nodes)))


def _unbacked_symbols(value: object) -> set[Any]:
    if isinstance(value, (tuple, list)):
        return {symbol for each in value for symbol in _unbacked_symbols(each)}
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_unbacked_symbols(value))
    return set()


def backward_nodes(graph: Graph) -> frozenset[Node]:
    """The nodes of a joint graph's backward half: those AOTAutograd marked, and all that depend on a tangent."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        marked = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        if marked or is_tangent(node) or any(each in found for each in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a node's `meta["val"]`: one, or those of a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors(each)


def argument_key(argument: Any) -> Hashable:
    """A hashable stand-in for a node's argument: equal keys mean the same value of the same type.

    Python holds `1 == 1.0 == True`, and an operator's result type depends on which it is; hence the types. Whatever has
    no such key (a symbolic size, a tensor) gets one by identity.
    """
    if isinstance(argument, Node):
        return (Node, argument.name)
    if isinstance(argument, (tuple, list)):
        return (list, *(argument_key(each) for each in argument))
    if isinstance(argument, dict):
        return (dict, *((name, argument_key(argument[name])) for name in sorted(argument)))
    if isinstance(argument, slice):
        return (slice, *(argument_key(each) for each in (argument.start, argument.stop, argument.step)))
    if argument is None or isinstance(argument, (bool, int, float, complex, str)):
        return (type(argument), repr(argument))
    if isinstance(argument, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return (type(argument), str(argument))
    return (type(argument), id(argument))

"""Facts about a node that a pass needs without running it: whether it is pure, random, or part of the backward.

Purity is decided by a list of operators that are known to be pure, not of impure ones: a custom operator may draw
random numbers or print, and nothing in its schema says so. Calls that are not known are never moved or removed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import Graph, Node

from passes.compat import free_unbacked_symbols, schema_of, statically_known_true

OPERATOR_OVERLOAD: Any = type(torch.ops.aten.add.Tensor)
"""The class of `aten.add.Tensor` and its like, taken from an instance because it has no public name."""

_PURE_NAMESPACES = frozenset({"aten", "prims", "bitsandbytes"})
"""Those whose operators have no state, and write only to what their schemas say. Bitsandbytes' products with quantised
weights are recomputed like any other."""

# Those of our own operators that have no state: the same arguments give the same bits.
_PURE_OURS = frozenset(
    (
        *(f"memopt::fp8_{name}" for name in ("quantize", "quantize_by", "dequantize", "matmul", "linear")),
        # What stands for exchanges between cards, which all run the same schedule: `memopt.capture.tensor_parallel`.
        *(f"memopt::{name}" for name in ("gather_shards", "scatter_sums", "gather_copies", "take_part", "sum_shards")),
    )
)

_PURE_PYTHON = frozenset(
    {
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
        operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
        operator.and_, operator.or_, *(getattr(torch, name) for name in dir(torch) if name.startswith("sym_")),
    }
)  # fmt: skip


def is_random(node: Node) -> bool:
    """True if the operator draws from a random generator. Attention counts as random only if it has dropout, although
    torch always tags it so."""
    target: Any = node.target
    if not (isinstance(target, OPERATOR_OVERLOAD) and torch.Tag.nondeterministic_seeded in target.tags):
        return False
    return arguments_of(node).get("dropout_p") != 0.0


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns the arguments of an operator's call by name, defaults included."""
    declared = schema_of(node.target).arguments
    defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return defaults | dict(zip((argument.name for argument in declared), node.args, strict=False)) | dict(node.kwargs)


def named_dims(given: Any, count: int) -> tuple[int, ...]:
    """Returns the dimensions that an operator's argument `dim` names, as numbers from 0. `given` is the argument: one
    number, several, or None or [] for all. `count` is the number of dimensions that the tensor has."""
    if given is None or given == []:
        return tuple(range(count))
    return tuple(dim % count for dim in (given if isinstance(given, (list, tuple)) else (given,)))


def attribute_of(node: Node) -> Any:
    """Returns what a `get_attr` names: a constant tensor, or a subgraph that a higher-order operator runs."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def graph_results(graph: Graph) -> tuple[Any, ...]:
    """Returns what a graph returns, in order: nodes, and values that are not nodes, such as numbers."""
    results: Any = graph.output_node().args[0]
    return tuple(results)


def is_tangent(node: Node) -> bool:
    """True for the inputs of a joint graph that are the gradients of its outputs."""
    return node.op == "placeholder" and str(node.target).startswith("tangents")


def is_pure(node: Node) -> bool:
    """True if the node may be removed when unused: it writes nothing, is not random, and asserts nothing.

    Collectives, higher-order operators and custom operators count as impure, except those of memopt that are known to
    be pure, and those of bitsandbytes."""
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
    """True if the result's sizes or value depend on data, so that each run of the call makes new symbols."""
    found = _unbacked_symbols(node.meta.get("val"))
    if not found:
        return False
    return bool(found.difference(*(_unbacked_symbols(source.meta.get("val")) for source in node.all_input_nodes)))


def _unbacked_symbols(value: object) -> set[Any]:
    if isinstance(value, (tuple, list)):
        return {symbol for element in value for symbol in _unbacked_symbols(element)}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        numbers = (*value.shape, *value.stride(), value.storage_offset())
        return {symbol for number in numbers if not isinstance(number, int) for symbol in free_unbacked_symbols(number)}
    if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set(free_unbacked_symbols(value))
    return set()


def backward_nodes(graph: Graph) -> frozenset[Node]:
    """Returns the nodes of a joint graph's backward: those that AOTAutograd tagged so, or that depend on a tangent."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        marked = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        if marked or is_tangent(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in a node's `meta["val"]`, which may be a nest of tuples and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors(element)


def is_float(node: Node) -> bool:
    """Returns whether `node.meta["val"]` is one tensor of a floating-point dtype."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def has_floats(node: Node) -> bool:
    """Returns whether `node.meta["val"]` is a tensor of a floating-point dtype, or a tuple or list with one in it."""
    return any(tensor.is_floating_point() for tensor in tensors(node.meta.get("val")))


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two shapes, or other sequences of sizes, are known to be equal for all values of symbols."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def argument_key(argument: Any, *, alike: bool = False) -> Hashable:
    """Returns a hashable key for a node's argument: equal keys mean the same value of the same type.

    The key holds types, since `1 == 1.0 == True` in Python, and an operator's result type depends on which it is.
    Symbolic sizes and tensors are compared by identity. With `alike`, all nodes have the same key, and so have symbolic
    sizes with the same expression."""
    if isinstance(argument, Node):
        return Node if alike else (Node, argument.name)
    if argument is None or isinstance(argument, (int, str)):
        return (type(argument), argument)
    if isinstance(argument, (tuple, list)):
        return (list, *(argument_key(element, alike=alike) for element in argument))
    if isinstance(argument, dict):
        return (dict, *((name, argument_key(argument[name], alike=alike)) for name in sorted(argument)))
    if isinstance(argument, slice):
        return slice, argument_key((argument.start, argument.stop, argument.step), alike=alike)
    if isinstance(argument, (float, complex)):
        return (type(argument), repr(argument))  # 0.0 == -0.0
    if isinstance(argument, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return (type(argument), str(argument))
    if alike and isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(argument), str(argument))
    return (type(argument), id(argument))


def sources_of(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments, in order, each as often as it occurs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(sorted(node.kwargs.items()))), found.append)
    return found


def ancestors(nodes: Iterable[Node], follow: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Yields the nodes and what they are computed from, each once, nearest first. The inputs of a node for which
    `follow` is false are left out, unless they are found otherwise."""
    found = dict.fromkeys(nodes)
    pending = list(found)
    for node in pending:  # grows
        yield node
        if follow(node):
            fresh = [source for source in node.all_input_nodes if source not in found]
            found.update(dict.fromkeys(fresh))
            pending += fresh


def value_kind(value: Any) -> Hashable:
    """A key for a node's `meta["val"]`: equal for strided tensors of equal type, dtype, device, `requires_grad`, shape,
    strides and storage offset. Other tensors are compared by identity, tuples and lists by their elements, and all else
    as arguments that are `alike`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return value.layout, id(value)
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        numbers = tuple(size if isinstance(size, int) else str(size) for size in sizes)
        return type(value), value.dtype, str(value.device), value.requires_grad, numbers
    if isinstance(value, (tuple, list)):
        return tuple(map(value_kind, value))
    return argument_key(value, alike=True)


def module_path(node: fx.Node) -> str:
    """Returns the path of the module that ran the node, as in `model.named_modules()`; "" if tracing recorded none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    source = str(next(reversed(stack.values()))[0])
    return _without_root(source)


def _without_root(source: str) -> str:
    """Returns `layers.0` for `L['self'].layers.0`, for `L['self']._modules['layers']._modules['0']`, and for
    `L['self'].__dict__['_modules']['layers'].…`, which modules with a `__getattr__` of their own give (PEFT's)."""
    source = re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]", r".\1", source)
    source = re.sub(r"\[(\d+)\]", r".\1", source)
    root = re.match(r"[LG]\['[^']*'\](\.__closure__\.\d+|\.__self__|\.__func__|\.cell_contents)*\.?", source)
    return source[root.end() :] if root else source


def block_of(path: str) -> str:
    """Returns the path of the repeated block that the module or parameter at `path` lies in: `layers.3` for
    `layers.3.mlp`. A block is an element of the outermost list of modules; "" for a path in no such list."""
    parts = path.split(".")
    element = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return "" if element is None else ".".join(parts[: element + 1])

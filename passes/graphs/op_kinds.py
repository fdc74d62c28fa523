"""Kinds of operators: casts, views and copies, elementwise operators, and how they treat dtypes."""

from typing import Any

import torch
from torch.fx import Node

from passes.compat import schema_of
from passes.graphs.node_facts import OPERATOR_OVERLOAD
from passes.ops.data_attribute import DATA

_CASTS = frozenset({"to", "_to_copy", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})

_VIEWS = frozenset(
    {
        "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "lift_fresh", "mT",
        "movedim", "narrow", "numpy_T", "permute", "ravel", "reshape", "select", "slice", "split", "split_with_sizes",
        "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold",
        "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view",
    }
)  # fmt: skip

_COPIES = frozenset(
    {
        "clone", "constant_pad_nd", "contiguous", "embedding", "flip", "gather", "index", "index_select",
        "lift_fresh_copy", "masked_select", "pad", "repeat", "repeat_interleave", "roll", "take", "take_along_dim",
        "tile", "tril", "triu", "_unsafe_index",
    }
)  # fmt: skip

# Their result is one of their elements, or zero: exact in any dtype.
_SELECTS = frozenset(
    {
        "adaptive_max_pool1d", "adaptive_max_pool2d", "amax", "amin", "argmax", "argmin", "argsort", "max",
        "max_pool1d", "max_pool2d", "max_pool3d", "median", "min", "sort", "topk",
    }
)  # fmt: skip

# Composite operators that are elementwise, or promote their operands alike, though torch does not tag them so.
_POINTWISE = frozenset(
    {
        "add", "alpha_dropout", "cat", "concat", "div", "divide", "dropout", "feature_dropout", "glu", "hardswish",
        "hstack", "log_sigmoid", "masked_fill", "masked_fill_", "mul", "multiply", "native_dropout", "stack", "sub",
        "subtract", "vstack", "where",
    }
)  # fmt: skip

_NEW = frozenset(
    {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn")}
    | {f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")}
)

_FILLS = frozenset(
    {"fill", "fill_", "full", "full_like", "masked_fill", "masked_fill_", "new_full", "scalar_tensor", "where", "pad"}
)


def op_name(node: Node) -> str:
    """Returns `layer_norm` for a call of `aten.layer_norm.default`; "" for anything but an operator of aten."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OPERATOR_OVERLOAD) or target.namespace != "aten":
        return ""
    return str(target.overloadpacket.__name__)


def is_cast(node: Node) -> bool:
    """True for a call that may change its input's dtype and nothing else (a device or a layout, at most)."""
    return op_name(node) in _CASTS


def is_view(node: Node) -> bool:
    """True for a call whose result is a view of its first argument, or may be one."""
    return op_name(node) in _VIEWS or node.target is DATA


def moves_data(node: Node) -> bool:
    """True for a call that only rearranges, copies or picks elements of its first argument: exact in any dtype."""
    return is_view(node) or op_name(node) in _COPIES


def follows_input(node: Node) -> bool:
    """True for a call whose result has its first argument's dtype and is as exact in 16 bits as in 32."""
    return moves_data(node) or op_name(node) in _SELECTS


def is_new(node: Node) -> bool:
    """True for a call that reads its first argument's shape and dtype at most: `zeros_like`, `new_ones`."""
    return op_name(node) in _NEW


def is_pointwise(node: Node) -> bool:
    """True for a call that works element by element and promotes its operands to a common dtype."""
    target: Any = node.target
    name = op_name(node)
    return bool(name) and (name in _POINTWISE or torch.Tag.pointwise in target.tags)


def promotes(node: Node) -> bool:
    """True if the kernel itself takes operands of different dtypes and computes in the wider."""
    target: Any = node.target
    name = op_name(node)
    return name in {"add", "sub", "mul", "div", "where", "cat", "stack"} or (
        bool(name) and torch.Tag.pointwise in target.tags and name not in {"lerp", "gelu", "prelu"}
    )


def mutated_arguments(node: Node) -> tuple[Node, ...]:
    """Returns the tensors among the arguments that the operator writes to, by its schema."""
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OPERATOR_OVERLOAD):
        return ()
    found = []
    for index, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (tuple, list)) else [value]
        found += [written for written in values if isinstance(written, Node)]
    return tuple(found)


def fills_with(node: Node) -> tuple[tuple[int | str, float], ...]:
    """Returns the numbers with which a call may fill its result: positions (or keywords) and values."""
    if op_name(node) not in _FILLS:
        return ()
    places: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    return tuple((place, float(value)) for place, value in places if type(value) in (float, int))

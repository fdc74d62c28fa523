"""Recognises means of squares and variances in a graph: of which value, over which dimensions."""

import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from passes.compat import schema_of
from passes.graphs.op_kinds import is_cast, op_name


@dataclass(frozen=True)
class Spread:
    """The mean of squares of `value`, or its variance."""

    value: Node
    dims: tuple[int, ...]
    centred: bool
    corrected: bool
    """Whether the sum is divided by n - 1 rather than n."""


def find_spread(node: Node) -> Spread | None:
    """Returns the mean of squares or the variance, dimensions kept, that a node is; None if it is neither."""
    source: Any = node.args[0] if node.args else None
    if is_element(node, 0) and op_name(source) == "var_mean":
        return of_statistics(source)
    if op_name(node) == "var":
        return of_statistics(node)
    if op_name(node) != "mean":
        return None
    base, given = _square_root(same_value(source)), _given(node)
    if base is None or not given.get("keepdim") or not given["dim"]:
        return None
    dims = _dims(base, given["dim"])
    value = centred_value(base, dims)
    return Spread(base if value is None else value, dims, centred=value is not None, corrected=False)


def of_statistics(node: Node) -> Spread | None:
    """Returns the variance that a `var`, `std`, `var_mean` or `std_mean` computes."""
    given = _given(node)
    if not given.get("keepdim") or not given.get("dim"):
        return None
    correction = given["correction"] if "correction" in given else int(given["unbiased"])
    value = same_value(given["self"])
    return Spread(value, _dims(value, given["dim"]), centred=True, corrected=correction != 0)


def centred_value(node: Any, dims: tuple[int, ...]) -> Any:
    """Returns x if a node is x - mean(x), else None."""
    if not isinstance(node, Node) or op_name(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    value, mean = (same_value(argument) for argument in node.args)
    if not isinstance(mean, Node):
        return None
    source: Any = mean.args[0] if mean.args else None
    if is_element(mean, 1) and op_name(source) in ("var_mean", "std_mean"):
        mean = source
    elif op_name(mean) != "mean":
        return None
    given = _given(mean)
    same = same_value(given["self"]) is value and given.get("keepdim") and given.get("dim")
    return value if same and _dims(value, given["dim"]) == dims else None


def _square_root(node: Any) -> Any:
    """Returns the value that a node is the square of, or None."""
    name = op_name(node)
    if name == "square" or power_of(node) == 2:
        return same_value(node.args[0])
    if name == "mul" and same_value(node.args[0]) is same_value(node.args[1]):
        return same_value(node.args[0])
    return None


def _dims(value: Node, dims: Any) -> tuple[int, ...]:
    count = value.meta["val"].dim()
    return tuple(sorted(dim % count for dim in (dims if isinstance(dims, (list, tuple)) else [dims])))


def _given(node: Node) -> dict[str, Any]:
    """Returns a call's arguments by name, defaults included."""
    target: Any = node.target
    schema = schema_of(target).arguments
    given = {declared.name: declared.default_value for declared in schema if declared.has_default_value()}
    return given | dict(zip((declared.name for declared in schema), node.args, strict=False)) | dict(node.kwargs)


def power_of(node: Node) -> float | None:
    """Returns the exponent of a call that raises its argument to the power of a number, or None."""
    exponent = node.args[1] if op_name(node) == "pow" else None
    return float(exponent) if type(exponent) in (int, float) else None  # type: ignore[arg-type]


def same_value(node: Any) -> Any:
    """Returns the value behind calls that do not change it, such as a cast to the dtype that it already has."""
    while isinstance(node, Node) and is_idle(node):
        node = node.args[0]
    return node


def is_idle(node: Node) -> bool:
    """Returns whether a call returns its argument unchanged."""
    source: Any = node.args[0] if node.args else None
    idle = is_cast(node) or op_name(node) in ("alias", "type_as")
    return idle and source.meta["val"].dtype == node.meta["val"].dtype


def is_element(node: Node, index: int) -> bool:
    """Returns whether a node is the element at `index` of a call's results."""
    return node.target is operator.getitem and node.args[1:] == (index,)

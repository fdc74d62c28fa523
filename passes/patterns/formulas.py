"""Reads what calls compute: polynomials in one value, constants, means of squares and variances."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from passes.compat import in_own_thread
from passes.graphs.node_facts import arguments_of, named_dims
from passes.graphs.op_kinds import is_cast, mutated_arguments, op_name

Polynomial: TypeAlias = Mapping[tuple[int, int], float]
"""Coefficients by the power of x and the power of a second value, t: `0.5 x t` is `{(1, 1): 0.5}`."""

X: Polynomial = {(1, 0): 1.0}
T: Polynomial = {(0, 1): 1.0}

_SAME = frozenset({"alias", "clone", "contiguous", "lift_fresh_copy"})
_MOST_TERMS = 16
_EXPONENTS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""The power to which each of these calls raises a constant."""


class Unknown(Exception):
    """Raised where an argument or a call cannot be read as a polynomial of the nodes that a `Reader` is given."""


class Reader:
    """Called with a node, returns the polynomial by which its value is computed. Reading stops at the nodes in `given`,
    which maps nodes to their polynomials."""

    def __init__(self, graph_module: GraphModule, given: Mapping[Node, Polynomial]) -> None:
        self.module, self.given = graph_module, given
        self.read: dict[Node, Polynomial] = {}

    @property
    def inner(self) -> list[Node]:
        """All nodes that this reader has read so far, in the graph's order, without constants and `given` nodes."""
        return sorted(node for node, value in self.read.items() if not is_constant(value))

    def __call__(self, value: Any) -> Polynomial:
        """Returns the polynomial that a node or a number is. Raises `Unknown` if it is none."""
        if type(value) in (int, float):
            return {(0, 0): float(value)} if value else {}
        if not isinstance(value, Node):
            raise Unknown(value)
        if value in self.given:
            return self.given[value]
        if value not in self.read:
            known = constant(self.module, value)
            self.read[value] = self._call(value) if known is None else _cleaned({(0, 0): known})
        return self.read[value]

    def _call(self, node: Node) -> Polynomial:
        name, arguments = op_name(node), node.args
        if name in _SAME or (is_cast(node) and node.meta["val"].is_floating_point()):
            return self(arguments[0])
        if name in ("add", "sub", "rsub"):
            one, other = (self(argument) for argument in arguments[:2])
            alpha = self(node.kwargs.get("alpha", 1) if len(arguments) < 3 else arguments[2])
            if name == "rsub":
                one, other = other, one
            sign: Polynomial = {(0, 0): 1.0 if name == "add" else -1.0}
            other = _product(_product(other, alpha, node), sign, node)
            return _cleaned({powers: one.get(powers, 0.0) + other.get(powers, 0.0) for powers in {**one, **other}})
        if name == "mul":
            return _product(self(arguments[0]), self(arguments[1]), node)
        if name == "div" and not node.kwargs:
            divisor = self(arguments[1])
            if not is_constant(divisor) or not divisor:
                raise Unknown(node)
            return _product(self(arguments[0]), {(0, 0): 1 / divisor[0, 0]}, node)
        if name == "neg":
            return _product(self(arguments[0]), {(0, 0): -1.0}, node)
        if name in ("square", "pow"):
            return self._power(arguments[0], 2 if name == "square" else arguments[1], node)
        raise Unknown(node)

    def _power(self, base: Any, exponent: Any, node: Node) -> Polynomial:
        read = self(exponent)
        power = read.get((0, 0), 0.0)
        if not is_constant(read) or power not in (1, 2, 3, 4) or isinstance(base, (int, float)):
            raise Unknown(node)
        result = factor = self(base)
        for _ in range(int(power) - 1):
            result = _product(result, factor, node)
        return result


def is_constant(value: Polynomial) -> bool:
    return set(value) <= {(0, 0)}


def constant(graph_module: GraphModule, value: Any) -> float | None:
    """Returns a number, given as a Python number or as a constant tensor of one element; None for anything else."""
    if type(value) in (int, float):
        return float(value)
    if not isinstance(value, Node) or any(
        value in mutated_arguments(user) and op_name(user) != "detach_" for user in value.users
    ):
        return None
    name = op_name(value)
    if value.op == "get_attr":
        return _held(graph_module, str(value.target))
    if name in ("full", "scalar_tensor") and value.meta["val"].dim() == 0:
        return constant(graph_module, value.args[-1])
    if name in _SAME | {"detach", "detach_", *_EXPONENTS} or is_cast(value):
        known = constant(graph_module, value.args[0])
        if known is None or name not in _EXPONENTS:
            return known
        return float(known ** _EXPONENTS[name]) if known > 0 else None
    return None


def _held(graph_module: GraphModule, target: str) -> float | None:
    held: Any = operator.attrgetter(target)(graph_module)
    if not isinstance(held, torch.Tensor) or held.numel() != 1 or held.requires_grad or hasattr(held, "fake_mode"):
        return None
    return float(in_own_thread(held.item))


def _product(one: Polynomial, other: Polynomial, node: Node) -> Polynomial:
    result: dict[tuple[int, int], float] = {}
    for (x, t), factor in one.items():
        for (more_x, more_t), more in other.items():
            powers = x + more_x, t + more_t
            result[powers] = result.get(powers, 0.0) + factor * more
    if len(result) > _MOST_TERMS:
        raise Unknown(node)
    return _cleaned(result)


def _cleaned(value: Polynomial) -> Polynomial:
    return {powers: term for powers, term in value.items() if term}


@dataclass(frozen=True)
class Variance:
    """The variance of `value` over the dimensions `dims`; or, if not `centred`, the mean of its squares."""

    value: Node
    dims: tuple[int, ...]
    centred: bool
    corrected: bool
    """Whether the sum is divided by n - 1 rather than n."""


def find_variance(node: Node) -> Variance | None:
    """Returns the variance, or the mean of squares, that a node computes with `keepdim`; None for any other node."""
    source: Any = node.args[0] if node.args else None
    if is_element(node, 0) and op_name(source) == "var_mean":
        return of_statistics(source)
    if op_name(node) == "var":
        return of_statistics(node)
    if op_name(node) != "mean":
        return None
    base, given = _square_root(same_value(source)), arguments_of(node)
    if base is None or not given.get("keepdim") or not given["dim"]:
        return None
    dims = _dims(base, given["dim"])
    value = centred_value(base, dims)
    return Variance(base if value is None else value, dims, centred=value is not None, corrected=False)


def of_statistics(node: Node) -> Variance | None:
    """Returns the variance that a `var`, `std`, `var_mean` or `std_mean` computes; None without `dim` or `keepdim`."""
    given = arguments_of(node)
    if not given.get("keepdim") or not given.get("dim"):
        return None
    correction = given["correction"] if "correction" in given else int(given["unbiased"])
    value = same_value(given["self"])
    return Variance(value, _dims(value, given["dim"]), centred=True, corrected=correction != 0)


def centred_value(node: Any, dims: tuple[int, ...]) -> Any:
    """Returns the node x if `node` computes x - mean(x, dims), else None."""
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
    given = arguments_of(mean)
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
    return tuple(sorted(named_dims(dims, value.meta["val"].dim())))


def power_of(node: Node) -> float | None:
    """Returns the exponent of a call that raises its argument to the power of a number, or None."""
    exponent = node.args[1] if op_name(node) == "pow" else None
    return float(exponent) if type(exponent) in (int, float) else None  # type: ignore[arg-type]


def same_value(node: Any) -> Any:
    """Returns the node whose value `node` passes on by aliases and casts to the same dtype; else `node` itself."""
    while isinstance(node, Node) and is_idle(node):
        node = node.args[0]
    return node


def is_idle(node: Node) -> bool:
    """Returns whether a call is a cast or alias that leaves its argument's dtype and values as they are."""
    source: Any = node.args[0] if node.args else None
    idle = is_cast(node) or op_name(node) in ("alias", "type_as")
    return idle and source.meta["val"].dtype == node.meta["val"].dtype


def is_element(node: Node, index: int) -> bool:
    """Returns whether a node is the element at `index` of a call's results."""
    return node.target is operator.getitem and node.args[1:] == (index,)

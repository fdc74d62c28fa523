"""Reads elementwise calls as polynomials in one value, so that a formula is recognised however it is written."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from passes.graphs.op_kinds import is_cast, mutated_arguments, op_name

Polynomial: TypeAlias = Mapping[tuple[int, int], float]
"""Coefficients by the power of x and the power of a second value, t: `0.5 x t` is `{(1, 1): 0.5}`."""

X: Polynomial = {(1, 0): 1.0}
T: Polynomial = {(0, 1): 1.0}

_SAME = frozenset({"alias", "clone", "contiguous", "lift_fresh_copy"})
_MOST_TERMS = 16
_EXPONENTS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""The functions that compute calls on constants."""


class Unknown(Exception):
    """An argument or a call is no polynomial of the given nodes."""


class Reader:
    """Reads nodes as polynomials of `given` nodes; `inner` lists the calls on them that it has read."""

    def __init__(self, graph_module: GraphModule, given: Mapping[Node, Polynomial]) -> None:
        self.module, self.given = graph_module, given
        self.read: dict[Node, Polynomial] = {}

    @property
    def inner(self) -> list[Node]:
        """The calls that were read, in the graph's order, without constants."""
        return sorted(node for node, value in self.read.items() if not is_constant(value))

    def __call__(self, value: Any) -> Polynomial:
        """Returns the polynomial that a node or a number is. Raises `Unknown`."""
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
            sign: Polynomial = {(0, 0): 1.0 if name == "add" else -1.0}
            if name == "rsub":
                one, other = other, _product(one, alpha, node)
            else:
                other = _product(other, alpha, node)
            return _sum(one, _product(other, sign, node))
        if name == "mul":
            return _product(self(arguments[0]), self(arguments[1]), node)
        if name == "div" and not node.kwargs:
            return _product(self(arguments[0]), {(0, 0): 1 / self._divisor(arguments[1], node)}, node)
        if name == "neg":
            return _product(self(arguments[0]), {(0, 0): -1.0}, node)
        if name in ("square", "pow"):
            return self._power(arguments[0], 2 if name == "square" else arguments[1], node)
        raise Unknown(node)

    def _divisor(self, value: Any, node: Node) -> float:
        divisor = self(value)
        if not is_constant(divisor) or not divisor:
            raise Unknown(node)
        return divisor[0, 0]

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
    """Returns a number, also one in a tensor without dimensions or of one element; None for anything else."""
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
    held: Any = graph_module
    for name in target.split("."):
        held = getattr(held, name)
    if not isinstance(held, torch.Tensor) or held.numel() != 1 or held.requires_grad or hasattr(held, "fake_mode"):
        return None
    # Dispatch modes, such as that of tracing, belong to a thread; a new thread has none.
    with ThreadPoolExecutor(1, "passes-constant") as worker:
        return float(worker.submit(held.item).result())


def _sum(one: Polynomial, other: Polynomial) -> Polynomial:
    return _cleaned({powers: one.get(powers, 0.0) + other.get(powers, 0.0) for powers in {**one, **other}})


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

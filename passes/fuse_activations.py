"""Replaces each written-out GELU or SiLU by one operator, which saves only its input for the backward."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.edit import on_stored_values
from passes.graphs.node_facts import ancestors, is_float, same_sizes
from passes.graphs.op_kinds import is_cast, op_name
from passes.rewrite_pattern import (
    SAME,
    Found,
    NoMatch,
    call_before,
    check_named,
    check_only_read_by,
    check_unwritten,
    constant,
    erase_inner,
    judged,
)

aten = torch.ops.aten

_Polynomial: TypeAlias = Mapping[tuple[int, int], float]
"""Coefficients by the power of x and the power of a second value, t: `0.5 x t` is `{(1, 1): 0.5}`."""

_X: _Polynomial = {(1, 0): 1.0}
_T: _Polynomial = {(0, 1): 1.0}
_MOST_TERMS = 16

_OPERATORS: Mapping[str, tuple[Any, Mapping[str, str]]] = {
    "gelu": (aten.gelu.default, {}),
    "gelu_tanh": (aten.gelu.default, {"approximate": "tanh"}),
    "silu": (aten.silu.default, {}),
}

_TANH_SCALE = math.sqrt(2 / math.pi)
_ACTIVATIONS: Mapping[str, tuple[str, Mapping[int, float]]] = {
    "gelu_tanh": ("tanh", {1: _TANH_SCALE, 3: _TANH_SCALE * 0.044715}),
    "gelu": ("erf", {1: math.sqrt(0.5)}),
    "silu": ("tanh", {1: 0.5}),
}
"""The polynomial in x that tanh or erf is taken of: coefficients by power of x."""

_COMPLEMENT: _Polynomial = {(0, 0): 1.0, (0, 1): -1.0}
_BOUNDED: Mapping[str, tuple[str, float, _Polynomial]] = {
    "tanh": ("tanh", 1.0, _T),
    "sigmoid": ("tanh", 0.5, {(0, 0): 0.5, (0, 1): 0.5}),
    "erf": ("erf", 1.0, _T),
    "special_erf": ("erf", 1.0, _T),
    "erfc": ("erf", 1.0, _COMPLEMENT),
    "special_erfc": ("erf", 1.0, _COMPLEMENT),
}
"""By operator: the function t, the factor of its argument, and the operator's result as a polynomial in t."""

_LOW = (torch.bfloat16, torch.float16)
_MOST_STEPS = 16


def find_activations(graph_module: GraphModule) -> tuple[Found, ...]:
    """Returns the formulas in an operator graph that look like GELU or SiLU, in the graph's order, each with the reason
    if `FuseActivations` cannot replace it."""
    found = judged(_bounded_calls(graph_module.graph), _match_activation)
    return tuple(
        Found(bounded.name, reason, match.kind if match else "") for bounded, match, reason in found if match or reason
    )


@dataclass(frozen=True)
class FuseActivations(Pass):
    """Replaces written-out GELU (with erf or its tanh approximation) and SiLU by `gelu` and `silu`.

    They are recognised by the function that they compute, in any order of operations. Formulas with other constants, or
    whose intermediate values are read elsewhere, are left alone: see `find_activations`. Results differ by rounding.

    Before:
        mul: f32[2, 8] = aten.mul.Tensor(hidden, 0.5)
        div: f32[2, 8] = aten.div.Tensor(hidden, 1.4142135623730951)
        erf: f32[2, 8] = aten.erf(div)
        add: f32[2, 8] = aten.add.Tensor(erf, 1.0)
        mul_1: f32[2, 8] = aten.mul.Tensor(mul, add)
    After:
        gelu: f32[2, 8] = aten.gelu(hidden)
    """

    activations: frozenset[str] | None = None
    """Names of the calls of tanh, erf and sigmoid whose formulas are rewritten; None: all that can be."""

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        if self.activations:
            reasons = {activation.name: activation.reason for activation in find_activations(graph_module)}
            mend = "name only activations that find_activations says can be rewritten"
            check_named(self.activations, reasons, "it is in no formula that looks like GELU or SiLU", mend)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        with on_stored_values(graph_module.graph):
            for _, match, _ in judged(_bounded_calls(graph_module.graph), _match_activation, self.activations):
                if match is not None:
                    target, options = _OPERATORS[match.kind]
                    fused = call_before(min(match.results), match.inner[-1], target, match.value, **options)
                    for result in match.results:
                        result.replace_all_uses_with(fused)
                    erase_inner({*match.inner, *match.results}, match.value)
        return graph_module


class _Unknown(Exception):
    """Raised where an argument or a call cannot be read as a polynomial of the nodes that a `_Reader` is given."""


class _Reader:
    """Called with a node, returns the polynomial by which its value is computed. Reading stops at the nodes in `given`,
    which maps nodes to their polynomials."""

    def __init__(self, given: Mapping[Node, _Polynomial]) -> None:
        self.given = given
        self.read: dict[Node, _Polynomial] = {}

    @property
    def inner(self) -> list[Node]:
        """All nodes that this reader has read so far, in the graph's order, without constants and `given` nodes."""
        return sorted(node for node, value in self.read.items() if not _is_constant(value))

    def __call__(self, value: Any) -> _Polynomial:
        """Returns the polynomial that a node or a number is. Raises `_Unknown` if it is none."""
        if type(value) in (int, float):
            return {(0, 0): float(value)} if value else {}
        if not isinstance(value, Node):
            raise _Unknown
        if value in self.given:
            return self.given[value]
        if value not in self.read:
            known = constant(value)
            self.read[value] = self._call(value) if known is None else _cleaned({(0, 0): known})
        return self.read[value]

    def _call(self, node: Node) -> _Polynomial:
        name, arguments = op_name(node), node.args
        if name in SAME or (is_cast(node) and node.meta["val"].is_floating_point()):
            return self(arguments[0])
        if name in ("add", "sub", "rsub"):
            one, other = (self(argument) for argument in arguments[:2])
            alpha = self(node.kwargs.get("alpha", 1) if len(arguments) < 3 else arguments[2])
            if name == "rsub":
                one, other = other, one
            sign: _Polynomial = {(0, 0): 1.0 if name == "add" else -1.0}
            other = _product(_product(other, alpha), sign)
            return _cleaned({powers: one.get(powers, 0.0) + other.get(powers, 0.0) for powers in {**one, **other}})
        if name == "mul":
            return _product(self(arguments[0]), self(arguments[1]))
        if name == "div" and not node.kwargs:
            divisor = self(arguments[1])
            if not _is_constant(divisor) or not divisor:
                raise _Unknown
            return _product(self(arguments[0]), {(0, 0): 1 / divisor[0, 0]})
        if name == "neg":
            return _product(self(arguments[0]), {(0, 0): -1.0})
        if name in ("square", "pow"):
            return self._power(arguments[0], 2 if name == "square" else arguments[1])
        raise _Unknown

    def _power(self, base: Any, exponent: Any) -> _Polynomial:
        read = self(exponent)
        if not _is_constant(read) or read.get((0, 0)) not in (1, 2, 3, 4) or isinstance(base, (int, float)):
            raise _Unknown
        return reduce(_product, [self(base)] * int(read[0, 0]))


def _is_constant(value: _Polynomial) -> bool:
    return set(value) <= {(0, 0)}


def _product(one: _Polynomial, other: _Polynomial) -> _Polynomial:
    result: dict[tuple[int, int], float] = {}
    for (x, t), factor in one.items():
        for (more_x, more_t), more in other.items():
            powers = x + more_x, t + more_t
            result[powers] = result.get(powers, 0.0) + factor * more
    if len(result) > _MOST_TERMS:
        raise _Unknown
    return _cleaned(result)


def _cleaned(value: _Polynomial) -> _Polynomial:
    return {powers: term for powers, term in value.items() if term}


@dataclass(frozen=True)
class _Formula:
    """A formula 0.5 x (1 + t) of a graph, where t is `function` of the polynomial `inside` (by power of x)."""

    function: str
    inside: Mapping[int, float]
    value: Node
    """x."""
    results: tuple[Node, ...]
    """The nodes whose value the formula is."""
    inner: tuple[Node, ...]
    """The calls between `value` and `results`, in the graph's order."""

    @property
    def kind(self) -> str:
        """The activation that this is, or "". Constants may be rounded to fp32, except in an fp64 graph."""
        tolerance = 1e-14 if self.value.meta["val"].dtype == torch.float64 else 1e-7
        for kind, (function, inside) in _ACTIVATIONS.items():
            if (function, inside.keys()) == (self.function, self.inside.keys()) and all(
                math.isclose(self.inside[power], inside[power], rel_tol=tolerance) for power in inside
            ):
                return kind
        return ""

    def __str__(self) -> str:
        terms = (f"{factor:.8g} x{'' if power == 1 else f'^{power}'}" for power, factor in self.inside.items())
        return f"0.5 x (1 + {self.function}({' + '.join(terms)}))"


def _bounded_calls(graph: Graph) -> Iterator[Node]:
    """Yields the calls of tanh, erf and sigmoid, from which activations are made, in order."""
    return (node for node in graph.nodes if op_name(node) in _BOUNDED)


def _match_activation(bounded: Node) -> _Formula | None:
    """Returns the activation that a tanh, erf or sigmoid is a part of; None if it is in no formula 0.5 x (1 + t).
    Raises `NoMatch`, with the reason, for such a formula that is neither GELU nor SiLU, or that cannot be replaced."""
    formulas = list(_formulas(bounded))
    if not formulas:
        return None
    formula = next((other for other in formulas if other.kind), formulas[0])
    if not formula.kind:
        raise NoMatch(f"the formula is {formula}, which is neither GELU nor SiLU")
    _check(formula)
    match = _widened(formula)
    check_only_read_by(match.inner, {*match.inner, *match.results}, match.value)
    check_unwritten([match.value], match.inner[0], max(match.results))
    return match


def _check(formula: _Formula) -> None:
    (node,) = formula.results
    value, result = formula.value.meta["val"], node.meta["val"]
    steps = [call.meta["val"] for call in formula.inner]
    if not same_sizes(result.shape, value.shape):
        raise NoMatch(f"{node.name} has another shape than {formula.value.name}")
    if {value.dtype, *(step.dtype for step in steps)} != {result.dtype}:
        raise NoMatch("the calls to replace differ in dtype")
    if not all(same_sizes(step.stride(), result.stride()) for step in steps):
        raise NoMatch("the calls to replace differ in memory layout")


def _formulas(bounded: Node) -> Iterator[_Formula]:
    """Yields the formulas 0.5 x (1 + t) that the bounded value may be part of, for all choices of x."""
    function, factor, outer = _BOUNDED[op_name(bounded)]
    followers = _followers(bounded)
    # x is one of the values that the bounded one may be computed from, nearest first.
    for value in islice(filter(is_float, ancestors(bounded.all_input_nodes, is_float)), _MOST_STEPS):
        argument = _Reader({value: _X})
        try:
            inside = argument(bounded.args[0])
        except _Unknown:
            continue
        powers = sorted(power for power, _ in inside)
        if not powers or powers[0] < 1:
            continue
        sign = math.copysign(1.0, inside[powers[-1], 0])  # both functions are odd
        signed = {(x, t): term * sign**t for (x, t), term in outer.items()}
        by_power = {power: sign * factor * inside[power, 0] for power in powers}
        for result in followers:
            reader = _Reader({value: _X, bounded: signed})
            if _is_half_of_both(reader, result):
                inner = sorted({*argument.inner, *reader.inner, bounded} - {result})
                yield _Formula(function, by_power, value, (result,), tuple(inner))


def _is_half_of_both(reader: _Reader, result: Node) -> bool:
    """Returns whether `result` is 0.5 x + 0.5 x t, where `reader` writes a node as a polynomial in x and t: the
    coefficient by the powers of the two."""
    try:
        read = reader(result)
    except _Unknown:
        return False
    return read.keys() == {(1, 0), (1, 1)} and all(math.isclose(value, 0.5, rel_tol=1e-9) for value in read.values())


def _followers(bounded: Node) -> list[Node]:
    """Returns the nearest calls that depend on the bounded value, in the graph's order."""
    found: set[Node] = set()
    pending = [bounded]
    while pending and len(found) < _MOST_STEPS:
        users = [user for user in pending.pop(0).users if user not in found and op_name(user) and is_float(user)]
        found.update(users)
        pending += users
    return sorted(found)


def _widened(formula: _Formula) -> _Formula:
    """Moves a match to the 16-bit values around it, where the model widens to fp32 for the formula and casts back: the
    fused operators compute in fp32 as well."""
    value, (result,) = formula.value, formula.results
    source = value.args[0] if is_cast(value) else None
    if isinstance(source, Node) and source.meta["val"].dtype in _LOW and result.meta["val"].dtype == torch.float32:
        readers = [user for user in result.users if op_name(user) != "sym_size"]
        if all(is_cast(user) and user.meta["val"].dtype == source.meta["val"].dtype for user in readers):
            return replace(formula, value=source, results=tuple(readers), inner=(*formula.inner, result))
    return formula

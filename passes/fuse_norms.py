"""Replaces written-out LayerNorm by `layer_norm`, which saves its input and two numbers for each row."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import Pass
from passes.graphs.edit import on_stored_values
from passes.graphs.node_facts import ancestors, arguments_of, named_dims, same_sizes, tensors
from passes.graphs.op_kinds import is_cast, op_name
from passes.rewrite_pattern import (
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


def find_norms(graph_module: GraphModule) -> tuple[Found, ...]:
    """Returns what looks like LayerNorm or RMSNorm in an operator graph, in the graph's order, each with the reason if
    `FuseNorms` cannot replace it."""
    found = judged(_roots(graph_module.graph), _match_norm)
    return tuple(Found(root.name, reason) for root, match, reason in found if match or reason)


@dataclass(frozen=True)
class FuseNorms(Pass):
    """Replaces (x - mean) / sqrt(variance + eps) · weight + bias, over the last dimensions, by `layer_norm`.

    Weight and bias of another dtype or shape stay separate calls after it. Norms whose intermediate values are read
    elsewhere are left alone, and so is RMSNorm: `rms_norm` is traced into the same calls (torch 2.13) and would save
    nothing. See `find_norms`. Results differ by rounding.

    Before:
        mean: f32[2, 1] = aten.mean.dim(hidden, [-1], True)
        sub: f32[2, 8] = aten.sub.Tensor(hidden, mean)
        var: f32[2, 1] = aten.var.dim(hidden, [-1], False, True)
        add: f32[2, 1] = aten.add.Tensor(var, 1e-05)
        rsqrt: f32[2, 1] = aten.rsqrt(add)
        mul: f32[2, 8] = aten.mul.Tensor(sub, rsqrt)
    After:
        layer_norm: f32[2, 8] = aten.layer_norm(hidden, [8], None, None, 1e-05)
    """

    norms: frozenset[str] | None = None
    """Names of the calls of `sqrt`, `rsqrt`, `std` and the like whose norms are rewritten; None: all that can be."""

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        if self.norms:
            reasons = {norm.name: norm.reason for norm in find_norms(graph_module)}
            mend = "name only norms that find_norms says can be rewritten"
            check_named(self.norms, reasons, "it is no square root by which a norm divides", mend)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        with on_stored_values(graph):
            for root, match, _ in judged(_roots(graph), _match_norm, self.norms):
                if match is not None:
                    arguments = (match.value, list(match.sizes), match.weight, match.bias, match.eps)
                    fused = call_before(match.result, root, aten.layer_norm.default, *arguments)
                    match.result.replace_all_uses_with(fused)
                    erase_inner({*match.inner, match.result}, match.value)
        return graph_module


_STEPS = frozenset({"rsqrt", "sqrt", "std", "std_mean"})


@dataclass(frozen=True)
class _Variance:
    """The variance of `value` over the dimensions `dims`; or, if not `centred`, the mean of its squares."""

    value: Node
    dims: tuple[int, ...]
    centred: bool
    corrected: bool
    """Whether the sum is divided by n - 1 rather than n."""


@dataclass(frozen=True)
class _NormMatch:
    """A LayerNorm that is written out."""

    value: Node
    sizes: tuple[int, ...]
    """The sizes of the last dimensions, over which it normalises."""
    eps: float
    weight: Node | None
    bias: Node | None
    result: Node
    inner: tuple[Node, ...]
    """The calls between `value` and `result`, in the graph's order."""


def _roots(graph: Graph) -> Iterator[Node]:
    """Yields the calls that may be the standard deviation of a norm, or its inverse, in order."""
    return (node for node in graph.nodes if op_name(node) in _STEPS or _power_of(node) in (0.5, -0.5))


def _match_norm(root: Node) -> _NormMatch | None:
    """Returns the norm that one of `_roots` is part of, or None if it is part of nothing like one. Raises `NoMatch`,
    with the reason, for a norm that `layer_norm` does not compute or that cannot be replaced."""
    variance, eps = _under(root)
    quotient = _quotient(root)
    if variance is None or quotient is None:
        return None
    result, numerator, late_eps = quotient
    weight = None
    if not _is_numerator(numerator, variance):
        weight, numerator = _factors(numerator, variance)
        if numerator is None:
            return None
    _check_meaning(variance, late_eps)
    sizes = _last_sizes(variance)
    if weight is not None and not _fits(weight, variance, sizes):
        raise NoMatch("the weight differs in shape from the normalised dimensions, or in dtype from the input")
    if weight is None:
        weight, result = _next_operand("mul", result, variance, sizes)
    bias, result = _next_operand("add", result, variance, sizes) if weight is not None else (None, result)
    kept = {variance.value, weight, bias}
    inner = _between(result, kept)
    _check_layout((*inner, result), variance.value)
    check_only_read_by(inner, {*inner, result}, variance.value)
    check_unwritten([operand for operand in kept if operand is not None], inner[0], result)
    return _NormMatch(variance.value, sizes, eps, weight, bias, result, inner)


def _check_meaning(variance: _Variance, late_eps: bool) -> None:
    if not variance.centred:
        raise NoMatch("torch traces `rms_norm` into the same calls, so that fusing an RMSNorm saves nothing")
    if variance.corrected:
        raise NoMatch("the variance is divided by n - 1, not by n")
    if late_eps:
        raise NoMatch("eps is added to the standard deviation, not to the variance")


def _check_layout(steps: tuple[Node, ...], value: Node) -> None:
    """Raises `NoMatch` where dtype or layout would change: `layer_norm` keeps the dtype and is contiguous."""
    if {tensor.dtype for step in steps for tensor in tensors(step.meta["val"])} != {value.meta["val"].dtype}:
        raise NoMatch("the calls to replace differ in dtype")
    result = steps[-1].meta["val"]
    if not same_sizes(result.shape, value.meta["val"].shape):
        raise NoMatch("the result of the norm differs in shape from the input")
    expected = 1
    for size, stride in zip(reversed(result.shape), reversed(result.stride()), strict=True):
        if not same_sizes([stride], [expected]):
            raise NoMatch("the result of the norm is not contiguous")
        expected = expected * size


def _under(root: Node) -> tuple[_Variance | None, float]:
    """Returns the variance that a root is taken of, or None, and the eps that is added to it."""
    if op_name(root) in ("std", "std_mean"):
        return _of_statistics(root), 0.0
    source = _same_value(root.args[0])
    if op_name(source) == "add" and not source.kwargs and len(source.args) == 2:
        for variance, number in (source.args, source.args[::-1]):
            eps = constant(number)
            if eps is not None and isinstance(variance, Node):
                return _find_variance(_same_value(variance)), eps
    return _find_variance(source), 0.0


def _quotient(root: Node) -> tuple[Node, Any, bool] | None:
    """Returns the call that divides by a root, its numerator, and whether a number is added to the root first. None if
    nothing is divided by the root."""
    inverse, late_eps = op_name(root) == "rsqrt" or _power_of(root) == -0.5, False
    pending = [(user, root) for user in root.users]
    for reader, node in pending:  # grows
        name, first = op_name(reader), reader.args[0] if reader.args else None
        number = constant(reader.args[1]) if len(reader.args) == 2 and first is node else None
        if name == "reciprocal" and not inverse:
            inverse = True
        elif name == "add" and number is not None and not inverse:
            late_eps = True
        elif name == "div" and not inverse and first is not node and not reader.kwargs:
            return reader, _same_value(first), late_eps
        elif name == "mul" and inverse and number is None:
            other = reader.args[1] if first is node else first
            return reader, _same_value(other), late_eps
        elif not (name == "mul" and number == 1) and not _is_idle(reader) and not _is_element(reader, 0):
            continue
        pending += [(user, reader) for user in reader.users]
    return None


def _is_numerator(node: Any, variance: _Variance) -> bool:
    return bool((_centred_value(node, variance.dims) if variance.centred else node) is variance.value)


def _factors(node: Any, variance: _Variance) -> tuple[Any, Any]:
    """Returns weight and numerator if they are multiplied before the division; else None for both."""
    if isinstance(node, Node) and op_name(node) == "mul":
        for one, other in (node.args[:2], node.args[1::-1]):
            if isinstance(other, Node) and isinstance(one, Node) and _is_numerator(_same_value(other), variance):
                return one, other
    return None, None


def _last_sizes(variance: _Variance) -> tuple[int, ...]:
    shape = variance.value.meta["val"].shape
    if variance.dims != tuple(range(len(shape) - len(variance.dims), len(shape))):
        raise NoMatch(f"the norm is over dimension {', '.join(map(str, variance.dims))} of {len(shape)}, not the last")
    sizes = tuple(shape[dim] for dim in variance.dims)
    if not all(isinstance(size, int) for size in sizes):
        raise NoMatch("the size of a normalised dimension is symbolic")
    return sizes


def _fits(node: Any, variance: _Variance, sizes: tuple[int, ...]) -> bool:
    if not isinstance(node, Node):
        return False
    value = node.meta["val"]
    return same_sizes(value.shape, sizes) and value.dtype == variance.value.meta["val"].dtype


def _next_operand(name: str, result: Node, variance: _Variance, sizes: tuple[int, ...]) -> tuple[Node | None, Node]:
    """Returns the weight (`name` "mul") or bias ("add") that the only reader of `result` applies, and that reader; None
    and `result` where there is none."""
    node = result
    while len(node.users) == 1:
        (reader,) = node.users
        if _is_idle(reader):
            node = reader
            continue
        if op_name(reader) == name and len(reader.args) == 2 and not reader.kwargs:
            other: Any = reader.args[1] if reader.args[0] is node else reader.args[0]
            if other is not node and _fits(other, variance, sizes):
                return other, reader
        break
    return None, result


def _between(result: Node, kept: set[Node | None]) -> tuple[Node, ...]:
    """Returns the calls between the kept values and a result, without constants, in the graph's order."""

    def is_inner(node: Node) -> bool:
        return kept.isdisjoint((node, _same_value(node))) and constant(node) is None

    return tuple(sorted(node for node in ancestors([result], is_inner) if node is not result and is_inner(node)))


def _find_variance(node: Node) -> _Variance | None:
    """Returns the variance, or the mean of squares, that a node computes with `keepdim`; None for any other node."""
    source: Any = node.args[0] if node.args else None
    if _is_element(node, 0) and op_name(source) == "var_mean":
        return _of_statistics(source)
    if op_name(node) == "var":
        return _of_statistics(node)
    if op_name(node) != "mean":
        return None
    base, given = _square_root(_same_value(source)), arguments_of(node)
    if base is None or not given.get("keepdim") or not given["dim"]:
        return None
    dims = _dims(base, given["dim"])
    value = _centred_value(base, dims)
    return _Variance(base if value is None else value, dims, centred=value is not None, corrected=False)


def _of_statistics(node: Node) -> _Variance | None:
    """Returns the variance that a `var`, `std`, `var_mean` or `std_mean` computes; None without `dim` or `keepdim`."""
    given = arguments_of(node)
    if not given.get("keepdim") or not given.get("dim"):
        return None
    correction = given["correction"] if "correction" in given else int(given["unbiased"])
    value = _same_value(given["self"])
    return _Variance(value, _dims(value, given["dim"]), centred=True, corrected=correction != 0)


def _centred_value(node: Any, dims: tuple[int, ...]) -> Any:
    """Returns the node x if `node` computes x - mean(x, dims), else None."""
    if not isinstance(node, Node) or op_name(node) != "sub" or len(node.args) != 2 or node.kwargs:
        return None
    value, mean = (_same_value(argument) for argument in node.args)
    if not isinstance(mean, Node):
        return None
    source: Any = mean.args[0] if mean.args else None
    if _is_element(mean, 1) and op_name(source) in ("var_mean", "std_mean"):
        mean = source
    elif op_name(mean) != "mean":
        return None
    given = arguments_of(mean)
    same = _same_value(given["self"]) is value and given.get("keepdim") and given.get("dim")
    return value if same and _dims(value, given["dim"]) == dims else None


def _square_root(node: Any) -> Any:
    """Returns the value that a node is the square of, or None."""
    name = op_name(node)
    if name == "square" or _power_of(node) == 2:
        return _same_value(node.args[0])
    if name == "mul" and _same_value(node.args[0]) is _same_value(node.args[1]):
        return _same_value(node.args[0])
    return None


def _dims(value: Node, dims: Any) -> tuple[int, ...]:
    return tuple(sorted(named_dims(dims, value.meta["val"].dim())))


def _power_of(node: Node) -> float | None:
    """Returns the exponent of a call that raises its argument to the power of a number, or None."""
    exponent = node.args[1] if op_name(node) == "pow" else None
    return float(exponent) if type(exponent) in (int, float) else None  # type: ignore[arg-type]


def _same_value(node: Any) -> Any:
    """Returns the node whose value `node` passes on by aliases and casts to the same dtype; else `node` itself."""
    while isinstance(node, Node) and _is_idle(node):
        node = node.args[0]
    return node


def _is_idle(node: Node) -> bool:
    """Returns whether a call is a cast or alias that leaves its argument's dtype and values as they are."""
    source: Any = node.args[0] if node.args else None
    idle = is_cast(node) or op_name(node) in ("alias", "type_as")
    return idle and source.meta["val"].dtype == node.meta["val"].dtype


def _is_element(node: Node, index: int) -> bool:
    """Returns whether a node is the element at `index` of a call's results."""
    return node.target is operator.getitem and node.args[1:] == (index,)

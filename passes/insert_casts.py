"""Inserts the casts that make each operator compute in the dtype that was decided for it."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import schema_of
from passes.graph_pass import Pass
from passes.graphs.edit import new_call, on_stored_values, refresh
from passes.graphs.node_facts import OPERATOR_OVERLOAD, ancestors, is_float
from passes.graphs.op_kinds import (
    CAST_FIRST_ONLY,
    fills_with,
    follows_input,
    is_cast,
    is_new,
    moves_data,
    mutated_arguments,
    op_name,
    promotes,
)
from passes.graphs.verify import check_signature

# Kernels that read 16 bits and sum in fp32 when asked for an fp32 result: no cast of the input is needed.
_TAKES_DTYPE = frozenset({"sum", "mean", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "linalg_vector_norm"})


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Casts the floating-point operands of each named call to the dtype assigned to it.

    A call that is a cast itself gets the assigned dtype. Of calls without an assignment, those that only move data
    follow their input; any other gets operands in the dtype that they had before. A finite fill value, as of
    `masked_fill`, that is out of the 16-bit dtype's range is clamped to it.

    Before:
        linear: f32[4, 8] = aten.linear(x, weight)
        exp: f32[4, 8] = aten.exp(linear)
    After InsertCasts({"linear": bf16, "exp": f32}):
        to: bf16[4, 8] = aten.to.dtype(x, bf16)
        to_1: bf16[8, 8] = aten.to.dtype(weight, bf16)
        linear: bf16[4, 8] = aten.linear(to, to_1)
        to_2: f32[4, 8] = aten.to.dtype(linear, f32)
        exp: f32[4, 8] = aten.exp(to_2)
    """

    keeps_signature: ClassVar[bool] = False
    assignment: Mapping[str, torch.dtype]
    outputs: tuple[torch.dtype | None, ...] | None = None
    """For each of the graph's outputs, the dtype that it is cast to, or None for no cast. If the whole is None, all are
    cast back to the dtypes that they had."""

    def __repr__(self) -> str:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.assignment.values()]
        counts = ", ".join(f"{dtypes.count(name)} {name}" for name in sorted(set(dtypes)))
        return f"InsertCasts({counts or 'nothing'})"

    def ensures(self, before: GraphModule, after: GraphModule) -> None:
        super().ensures(before, after)
        if self.outputs is None:
            check_signature(before, after)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        given: dict[Node, Any] = {node: node.meta.get("val") for node in graph.nodes}
        with on_stored_values(graph):
            for node in list(graph.nodes):
                if node.op == "call_function":
                    self._retype(node, given)
                elif node.op == "output":
                    self._cast_outputs(node, given)
        return graph_module

    def _cast_outputs(self, output: Node, given: Mapping[Node, Any]) -> None:
        results = list(output.args[0])  # type: ignore[arg-type]
        cast: dict[tuple[Node, torch.dtype], Node] = {}
        for number, source in enumerate(results):
            if not (isinstance(source, Node) and is_float(source)):
                continue
            dtype = given[source].dtype if self.outputs is None else self.outputs[number]
            if dtype not in (None, source.meta["val"].dtype):
                if (source, dtype) not in cast:
                    cast[source, dtype] = _cast(output.graph, output, source, dtype)
                results[number] = cast[source, dtype]
        output.args = (tuple(results),)

    def _retype(self, node: Node, given: dict[Node, Any]) -> None:
        dtype = self.assignment.get(node.name)
        before = (node.args, node.kwargs)
        if dtype is not None and (is_cast(node) or _takes_dtype(node, dtype)):
            _set_dtype(node, dtype)
        elif dtype is not None:
            for operand in _operands(node, dtype):
                node.replace_input_with(operand, _cast(node.graph, node, operand, dtype))
        elif not (follows_input(node) or is_new(node) or node.target is operator.getitem):
            written = mutated_arguments(node)
            for source in node.all_input_nodes:
                known: Any = given.get(source, source.meta.get("val"))
                if is_float(source) and source not in written and source.meta["val"].dtype != known.dtype:
                    node.replace_input_with(source, _cast(node.graph, node, source, known.dtype))
        changed = (node.args, node.kwargs) != before
        if changed or any(source.meta.get("val") is not given.get(source) for source in node.all_input_nodes):
            refresh(node)
            if is_float(node) and node.meta["val"].dtype.itemsize < 4:
                _clamp_fills(node, torch.finfo(node.meta["val"].dtype).max)


def _operands(node: Node, dtype: torch.dtype) -> Iterator[Node]:
    """Yields the arguments to cast: floating point, of another dtype, not written to."""
    inputs = node.all_input_nodes[:1] if op_name(node) in CAST_FIRST_ONLY else node.all_input_nodes
    written = mutated_arguments(node)
    tensors = [tensor for tensor in inputs if is_float(tensor)]
    if written and promotes(node):
        return  # An in-place kernel casts its operands to what it writes to.
    if promotes(node) and any(tensor.meta["val"].dtype == dtype and tensor.meta["val"].dim() for tensor in tensors):
        # The widest operand decides, and a scalar tensor never does.
        tensors = [tensor for tensor in tensors if tensor.meta["val"].dim() and _wider(tensor.meta["val"].dtype, dtype)]
    for tensor in tensors:
        if tensor.meta["val"].dtype != dtype and tensor not in written:
            yield tensor


def _wider(one: torch.dtype, other: torch.dtype) -> bool:
    return torch.promote_types(one, other) != other


def _cast(graph: Graph, user: Node, value: Node, dtype: torch.dtype) -> Node:
    # A cast belongs to the module whose operator needs it.
    place = value if user.op == "output" else user
    with graph.inserting_before(user):
        cast = new_call(place, torch.ops.aten.to.dtype, value, dtype)
    if not _wider(value.meta["val"].dtype, dtype):
        return cast
    _hold_ancestors(value, torch.finfo(dtype).max)
    return cast


def _hold_ancestors(value: Node, largest: float) -> None:
    """Clamps to ±`largest` the numbers that fill a mask, so that they stay finite when `value` is cast. The mask may be
    `value`, or one of the values from which it is computed."""

    def passes_on(node: Node) -> bool:
        known = fills_with(node) or moves_data(node) or op_name(node) in ("add", "mul", "masked_fill", "where")
        return is_float(node) and bool(known)

    for node in filter(is_float, ancestors([value], passes_on)):
        _clamp_fills(node, largest)


def _clamp_fills(node: Node, largest: float) -> None:
    for place, number in fills_with(node):
        if not largest < abs(number) < float("inf"):
            continue
        held = largest if number > 0 else -largest
        if isinstance(place, int):
            node.update_arg(place, held)
        else:
            node.update_kwarg(place, held)


def _takes_dtype(node: Node, dtype: torch.dtype) -> bool:
    named = node.kwargs.get("dtype") is not None or any(isinstance(argument, torch.dtype) for argument in node.args)
    return op_name(node) in _TAKES_DTYPE and is_float(node) and (named or dtype == torch.float32)


def _set_dtype(node: Node, dtype: torch.dtype) -> None:
    """Sets a call's `dtype` argument, by position if it is given so."""
    target: Any = node.target
    assert isinstance(target, OPERATOR_OVERLOAD)
    names = [argument.name for argument in schema_of(target).arguments]
    if "dtype" in names and names.index("dtype") < len(node.args):
        node.update_arg(names.index("dtype"), dtype)
    elif "dtype" in names:
        node.update_kwarg("dtype", dtype)

"""Casts that make each operator compute in the dtype that was decided for it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import schema_of
from passes.graph_pass import Pass
from passes.graphs.edit import new_call
from passes.graphs.node_facts import OPERATOR_OVERLOAD
from passes.graphs.op_kinds import (
    fills_with,
    follows_input,
    is_cast,
    is_new,
    moves_data,
    mutated_arguments,
    op_name,
    promotes,
)
from passes.graphs.propagate import on_stored_values, refresh
from passes.graphs.verify import check_signature

# Parameters and running statistics stay as they are: the kernels take a 16-bit input with them.
_CAST_FIRST_ONLY = frozenset({"batch_norm", "native_batch_norm", "instance_norm"})
# Kernels that read 16 bits and sum in fp32 when asked for an fp32 result: no cast of the input is needed.
_TAKES_DTYPE = frozenset({"sum", "mean", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "linalg_vector_norm"})


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Casts the floating-point operands of each named call to the dtype assigned to it, once a use.

    A cast in the graph is given the assigned dtype. Calls without an assignment that only move data take what comes;
    any other is given what it was given before. Numbers that fill a 16-bit value, as masks do, stay within its range.

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
    keep_outputs: bool = True
    """Cast what the graph returns back to the dtype it had."""

    def __repr__(self) -> str:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.assignment.values()]
        counts = ", ".join(f"{dtypes.count(name)} {name}" for name in sorted(set(dtypes)))
        return f"InsertCasts({counts or 'nothing'})"

    def ensures(self, before: GraphModule, after: GraphModule) -> None:
        super().ensures(before, after)
        if self.keep_outputs:
            check_signature(before, after)

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        given: dict[Node, Any] = {node: node.meta.get("val") for node in graph.nodes}
        with on_stored_values(graph):
            for node in list(graph.nodes):
                if node.op == "call_function":
                    self._retype(node, given)
                elif node.op == "output" and self.keep_outputs:
                    for each in node.all_input_nodes:
                        if _floating(each) and each.meta["val"].dtype != given[each].dtype:
                            node.replace_input_with(each, _cast(graph, node, each, given[each].dtype))
        return graph_module

    def _retype(self, node: Node, given: dict[Node, Any]) -> None:
        dtype = self.assignment.get(node.name)
        before = (node.args, node.kwargs)
        if dtype is not None and (is_cast(node) or _takes_dtype(node, dtype)):
            _set_dtype(node, dtype)
        elif dtype is not None:
            for each in _operands(node, dtype):
                node.replace_input_with(each, _cast(node.graph, node, each, dtype))
        elif not (follows_input(node) or is_new(node) or _is_getitem(node)):
            written = mutated_arguments(node)
            for each in node.all_input_nodes:
                known: Any = given.get(each, each.meta.get("val"))
                if _floating(each) and each not in written and each.meta["val"].dtype != known.dtype:
                    node.replace_input_with(each, _cast(node.graph, node, each, known.dtype))
        changed = (node.args, node.kwargs) != before
        if changed or any(each.meta.get("val") is not given.get(each) for each in node.all_input_nodes):
            refresh(node)
            _hold_fills(node)


def _operands(node: Node, dtype: torch.dtype) -> Iterator[Node]:
    """The arguments to cast: floating point, not yet of the dtype, not written to."""
    inputs = node.all_input_nodes[:1] if op_name(node) in _CAST_FIRST_ONLY else node.all_input_nodes
    written = mutated_arguments(node)
    tensors = [each for each in inputs if _floating(each)]
    if written and promotes(node):
        return  # An in-place kernel casts its operands to what it writes to.
    if promotes(node) and any(each.meta["val"].dtype == dtype and each.meta["val"].dim() for each in tensors):
        # The widest operand decides, and a scalar tensor never does.
        tensors = [each for each in tensors if each.meta["val"].dim() and _wider(each.meta["val"].dtype, dtype)]
    for each in tensors:
        if each.meta["val"].dtype != dtype and each not in written:
            yield each


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
    """Hold within range the numbers that fill a mask before it is cast: rounding would make them infinite."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop()
        _clamp_fills(node, largest)
        if fills_with(node) or moves_data(node) or op_name(node) in ("add", "mul", "masked_fill", "where"):
            fresh = [each for each in node.all_input_nodes if each not in seen and _floating(each)]
            seen.update(fresh)
            pending += fresh


def _hold_fills(node: Node) -> None:
    if _floating(node) and node.meta["val"].dtype.itemsize < 4:
        _clamp_fills(node, torch.finfo(node.meta["val"].dtype).max)


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
    named = node.kwargs.get("dtype") is not None or any(isinstance(each, torch.dtype) for each in node.args)
    return op_name(node) in _TAKES_DTYPE and _floating(node) and (named or dtype == torch.float32)


def _set_dtype(node: Node, dtype: torch.dtype) -> None:
    """Give a call its `dtype` argument, by position where it has one."""
    target: Any = node.target
    assert isinstance(target, OPERATOR_OVERLOAD)
    names = [argument.name for argument in schema_of(target).arguments]
    if "dtype" in names and names.index("dtype") < len(node.args):
        node.update_arg(names.index("dtype"), dtype)
    elif "dtype" in names:
        node.update_kwarg("dtype", dtype)


def _is_getitem(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()

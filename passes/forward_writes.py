"""Makes calls read a value itself, not the buffer that it was written to."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import viewed_argument
from passes.graphs.edit import erase_unread, on_stored_values, refresh, replace_node
from passes.graphs.node_facts import OPERATOR_OVERLOAD, may_write, same_sizes
from passes.graphs.op_kinds import is_pointwise

aten = torch.ops.aten


@dataclass(frozen=True)
class ForwardWrites(Pass):
    """Makes calls that read a part of a buffer read the value that was written there; bit for bit the same numbers.

    In a functional graph, each write of a tile to a buffer makes a copy of the whole buffer. A copy that nothing reads
    any more is erased. A value is read instead of a part only if it has the part's memory layout; or, where the part
    has gaps between its rows, if what reads it gives the same bits without them.

    Before:
        slice_1: f32[4, 3] = aten.slice(buffer, 1, 0, 3)
        copy: f32[4, 3] = aten.copy(slice_1, mm)
        slice_scatter: f32[4, 8] = aten.slice_scatter(buffer, copy, 1, 0, 3)
        slice_2: f32[4, 3] = aten.slice(slice_scatter, 1, 0, 3)
        exp: f32[4, 3] = aten.exp(slice_2)
    After:
        exp: f32[4, 3] = aten.exp(mm)
    """

    graph: ClassVar[GraphKind] = "joint"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        moved: set[Node] = set()
        """Calls that read a value which may have other strides than before."""
        with on_stored_values(graph):
            for node in list(graph.nodes):
                if node in moved and not _refreshed(node):
                    moved.update(node.users)
                source = _written_value(node) if node.op == "call_function" else None
                if source is None or not _can_stand_for(source, node):
                    continue
                if not same_sizes(source.meta["val"].stride(), node.meta["val"].stride()):
                    moved.update(node.users)
                read = node.all_input_nodes
                replace_node(node, source)
                erase_unread(read)
        return graph_module


def _refreshed(node: Node) -> bool:
    """Computes a call's stored value again; returns whether it is no view and has the strides that it had, so that
    nothing changes for its readers."""
    before = node.meta.get("val")
    refresh(node)
    after = node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return node.op == "output"
    if same_sizes(before.stride(), after.stride()) and viewed_argument(node) is None:
        node.meta["val"] = before
        return True
    return False


def _written_value(node: Node) -> Node | None:
    """Returns the value whose numbers a call returns: the source of a copy, the value that is written to all of a
    buffer, or, for a slice of a buffer, the value that was written to just that slice. None for any other call."""
    into, source = (*node.args, None, None)[:2]
    if node.target is aten.copy.default:
        return source if isinstance(source, Node) else None
    if node.target is aten.slice_scatter.default and isinstance(source, Node):
        return source if same_sizes(source.meta["val"].shape, node.meta["val"].shape) else None
    if node.target is not aten.slice.Tensor or not isinstance(into, Node):
        return None
    if into.target is not aten.slice_scatter.default or _range(node, node.args[1:]) != _range(node, into.args[2:]):
        return None
    return into.args[1] if isinstance(into.args[1], Node) else None


def _range(part: Node, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The dimension, start, end and step of a part, with the defaults of those that are not given."""
    defaults: tuple[Any, ...] = 0, None, None, 1
    dimension, start, end, step = (*given, *defaults[len(given) :])
    return dimension % part.meta["val"].dim(), start or 0, end, step


def _can_stand_for(source: Node, node: Node) -> bool:
    """Returns whether all readers of `node` may read `source` instead, and give the same bits. Both hold the same
    numbers, unless the call converts them to another dtype."""
    value, result = source.meta["val"], node.meta["val"]
    if (value.dtype, value.device, value.layout) != (result.dtype, result.device, result.layout):
        return False
    if not same_sizes(value.shape, result.shape):
        return False
    alike = same_sizes(value.stride(), result.stride())
    if not alike and not (_is_without_gaps(value) and _is_row_by_row(result)):
        return False
    if not alike and not _round_alike(node, aligned=_has_aligned_rows(value) and _has_aligned_rows(result)):
        return False
    if any(may_write(user) for user in (*node.users, *source.users)) or not _fills_new_memory(source):
        return False
    output = node.graph.output_node()
    if output not in node.users:
        return True
    are_results = viewed_argument(node) is None and viewed_argument(source) is None
    return alike and are_results and output not in source.users


def _round_alike(node: Node, *, aligned: bool) -> bool:
    """Returns whether all readers of a part of a buffer give the same bits for a value that lies there without gaps.
    Sums do not in general, as they run in the order of the memory. Matrix products do where all rows are `aligned`."""
    for user in node.users:
        if is_pointwise(user) or user.target in _EXACT or (aligned and user.target in _PRODUCTS):
            continue
        if user.target in _TURNS and _round_alike(user, aligned=aligned):
            continue
        # `copy` reads only the layout of its first argument, and returns that layout.
        laid_out = user.target is aten.copy.default and node is not user.args[1]
        if laid_out and _round_alike(user, aligned=aligned):
            continue
        if user.target is aten.slice_scatter.default and node is not user.args[0]:
            continue  # it copies the elements
        return False
    return True


def _is_without_gaps(value: torch.Tensor) -> bool:
    """Returns whether a value is known to be contiguous; its number of rows may be a symbol."""
    expected: Any = 1
    for size, stride in reversed(list(zip(value.shape, value.stride(), strict=True))):
        if not isinstance(stride, int) or not (stride == expected or (isinstance(size, int) and size == 1)):
            return False
        expected = expected * size if isinstance(size, int) and isinstance(expected, int) else None
    return True


def _has_aligned_rows(value: torch.Tensor) -> bool:
    """Returns whether rows begin, and end, at multiples of the vectors that matrix kernels work on."""
    lengths = (value.shape[-1], *value.stride()[:-1])
    return value.stride(-1) == 1 and all(isinstance(n, int) and n % _VECTOR == 0 for n in lengths)


_VECTOR = 8
"""Elements: 32 bytes in fp32. The pass's tests compare products of such rows with and without gaps, bit by bit."""
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
_EXACT = {aten._to_copy.default, aten.amax.default, aten.amin.default}
_TURNS = {aten.t.default, aten.transpose.int, aten.permute.default}


def _fills_new_memory(value: Node) -> bool:
    """Returns whether a value fills memory that an operator of the graph allocated. Then no later write to an input
    changes it, and holding it keeps no larger memory alive."""
    maker = value
    while (viewed := viewed_argument(maker)) is not None:
        maker = viewed
    made = isinstance(maker.target, OPERATOR_OVERLOAD)
    return made and (maker is value or same_sizes([maker.meta["val"].numel()], [value.meta["val"].numel()]))


def _is_row_by_row(value: torch.Tensor) -> bool:
    """Returns whether the elements lie in memory in the order of the dimensions, with gaps or without."""
    pairs = zip(value.shape, value.stride(), strict=True)
    strides = [stride for size, stride in pairs if not (isinstance(size, int) and size == 1)]
    return all(isinstance(stride, int) for stride in strides) and strides == sorted(strides, reverse=True)

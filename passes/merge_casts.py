"""Removes casts that change nothing, are undone or repeated; moves casts to fewer elements, and into sums."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import storages, storages_of
from passes.graphs.edit import new_call, on_stored_values, refresh, replace_node, restride, result_of
from passes.graphs.node_facts import is_float, may_write
from passes.graphs.op_kinds import PICKS, is_cast, is_view, moves_data, op_name
from passes.rewrite_pattern import RewritePattern


@dataclass(frozen=True)
class MergeCasts(Pass):
    """Keeps one cast of each value to each dtype, where it moves the fewest bytes; bit for bit the same values.

    A cast that changes nothing is removed, and so is widening followed by narrowing; narrowing followed by widening
    rounds, and stays. A cast moves past calls that only move data to the side with fewer elements: before `expand`,
    after `slice`; but never before `embedding` and other calls that pick elements by number, whose gradients would then
    be summed in 16 bits. Values that anything writes to are left alone, and so are casts to contiguous memory which a
    view relies on, or whose strides the graph returns.

    Before:
        expand: f32[8, 4] = aten.expand(x, [8, 4])
        to: bf16[8, 4] = aten.to.dtype(expand, bf16)
        to_1: f32[8, 4] = aten.to.dtype(to, f32)
        to_2: bf16[8, 4] = aten.to.dtype(to_1, bf16)
    After:
        to: bf16[1, 4] = aten.to.dtype(x, bf16)
        expand: bf16[8, 4] = aten.expand(to, [8, 4])
    """

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        written = storages_of(source for node in graph.nodes if may_write(node) for source in node.all_input_nodes)
        with on_stored_values(graph):
            casts, changed = _casts(graph), True
            while changed:
                changed = False
                for step in (_remove_round_trips, _share, _hoist, _sink):
                    if step(graph, casts, written):
                        casts, changed = _casts(graph), True
        return graph_module


def _casts(graph: Graph) -> list[Node]:
    """Returns the casts of a graph, in order."""
    return list(filter(is_cast, graph.nodes))


def _is_written(node: Node, written: frozenset[Hashable]) -> bool:
    """Returns whether a node's value lies in a storage that a call may write to."""
    return bool(written) and not written.isdisjoint(storages(node))


def _plain_casts(casts: list[Node], written: frozenset[Hashable]) -> Iterator[tuple[Node, Node, torch.dtype]]:
    """Yields those of the casts that change nothing but a floating dtype, with their source and dtype."""
    for node in casts:
        if len(node.all_input_nodes) != 1 or not isinstance(node.args[0], Node):
            continue
        source, value, before = node.args[0], node.meta["val"], node.args[0].meta["val"]
        if not (value.is_floating_point() and before.is_floating_point()) or value.device != before.device:
            continue
        if node.kwargs.get("memory_format") is not None or any(_is_written(at, written) for at in (node, source)):
            continue
        yield node, source, value.dtype


def _remove_round_trips(graph: Graph, casts: list[Node], written: frozenset[Hashable]) -> bool:
    changed = False
    returned = set(graph.output_node().all_input_nodes)
    for node, source, dtype in _plain_casts(casts, written):
        inner = source.args[0] if is_cast(source) else None
        if source.meta["val"].dtype == dtype and not (node in returned and source in returned):
            replace_node(node, source)
            changed = True
        elif isinstance(inner, Node) and _exact(inner, source) and not _is_written(inner, written):
            # Widening does not round: the second cast may read what the first one reads.
            if not restride({node: inner.meta["val"].to(dtype)}):
                continue
            node.replace_input_with(source, inner)
            changed = True
            if not source.users:
                graph.erase_node(source)
    return changed


def _exact(before: Node, after: Node) -> bool:
    """Returns whether a cast keeps every value, since its floating dtype holds all values of the other."""
    old, new = before.meta["val"], after.meta["val"]
    floating = old.is_floating_point() and old.device == new.device
    return floating and torch.promote_types(old.dtype, new.dtype) == new.dtype


def _share(graph: Graph, casts: list[Node], written: frozenset[Hashable]) -> bool:
    changed = False
    returned = set(graph.output_node().all_input_nodes)
    first_of: dict[tuple[Node, torch.dtype], Node] = {}
    for node, source, dtype in _plain_casts(casts, written):
        first = first_of.setdefault((source, dtype), node)
        if first is not node and node not in returned:
            replace_node(node, first)
            changed = True
    return changed


def _hoist(graph: Graph, casts: list[Node], written: frozenset[Hashable]) -> bool:
    """Casts a value before calls that view or copy it rather than their results, if these have no fewer elements."""
    groups: dict[tuple[Node, torch.dtype], list[Node]] = {}
    for node, moved, dtype in _plain_casts(casts, written):
        source = _source(moved)
        if source is None or op_name(moved) in PICKS or _is_written(source, written):
            continue
        if all(is_cast(user) for user in moved.users):
            groups.setdefault((source, dtype), []).append(node)
    changed = False
    for (origin, dtype), group in groups.items():
        fewer_here = sum(map(_numel, group)) >= _numel(origin)
        if not fewer_here or origin.meta["val"].dtype == dtype:
            continue
        if changed and any(_source(node.all_input_nodes[0]) is not origin for node in group):
            continue  # the origin is a cast that was just moved
        cast_origin = {origin: origin.meta["val"].to(dtype)}
        if not restride({node: result_of(node.all_input_nodes[0], cast_origin) for node in group}):
            continue
        with graph.inserting_after(_last_of_its_line(origin)):
            cast = new_call(group[0], torch.ops.aten.to.dtype, origin, dtype)
        for node in group:
            (moved,) = node.all_input_nodes
            with graph.inserting_before(node):
                again = graph.node_copy(moved)
            again.replace_input_with(origin, cast)
            refresh(again)
            replace_node(node, again)
            if not moved.users:
                graph.erase_node(moved)
        changed = True
    return changed


def _sink(graph: Graph, casts: list[Node], written: frozenset[Hashable]) -> bool:
    """Casts the elements that are picked out of a value rather than the whole value, if they are fewer."""
    changed = False
    for node, source, dtype in _plain_casts(casts, written):
        movers = list(node.users)
        if not movers or any(_source(user) is not node for user in movers):
            continue
        fewer_behind = sum(map(_numel, movers)) < _numel(source)
        if not fewer_behind or source.meta["val"].dtype == dtype:
            continue
        uncast = {node: source.meta["val"]}
        if not restride({mover: result_of(mover, uncast).to(dtype) for mover in movers}):
            continue
        for mover in movers:
            mover.replace_input_with(node, source)
            refresh(mover)
            with graph.inserting_after(mover):
                cast = new_call(mover, torch.ops.aten.to.dtype, mover, dtype)
            mover.replace_all_uses_with(cast)
            cast.update_arg(0, mover)
        graph.erase_node(node)
        changed = True
    return changed


def _source(node: Node) -> Node | None:
    """Returns the operand whose data a call moves; None if other operands are floats too, or it returns no tensor."""
    if not moves_data(node) or not isinstance(node.meta["val"], torch.Tensor) or not isinstance(node.args[0], Node):
        return None
    floating = [source for source in node.all_input_nodes if is_float(source)]
    return node.args[0] if floating == [node.args[0]] else None


def _numel(node: Node) -> float:
    """Returns the number of elements; NaN if a size is symbolic, so that no comparison holds and no guard is added."""
    sizes = node.meta["val"].shape
    return node.meta["val"].numel() if all(isinstance(size, int) for size in sizes) else float("nan")


def _last_of_its_line(source: Node) -> Node:
    """Returns the graph's last input if `source` is an input, since inputs stay in front; else `source`."""
    if source.op != "placeholder":
        return source
    return source.graph.find_nodes(op="placeholder")[-1]


_SUMS = frozenset({torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default})


@dataclass(frozen=True)
class SumInFp32(RewritePattern[list[Node]]):
    """Makes a sum of 16-bit values that is only cast to fp32, perhaps after views, return fp32.

    Kernels sum in fp32 anyway, so that this saves a rounding and a cast. The gradients of biases are such sums.

    Before:
        sum_1: bf16[1, 4] = aten.sum.dim_IntList(x, [0], True)
        view: bf16[4] = aten.view(sum_1, [4])
        _to_copy: f32[4] = aten._to_copy(view, dtype=f32)
    After:
        sum_1: f32[1, 4] = aten.sum.dim_IntList(x, [0], True, dtype=f32)
        view: f32[4] = aten.view(sum_1, [4])
    """

    graph: ClassVar[GraphKind] = "joint"

    def match(self, node: Node) -> list[Node] | None:
        return (is_cast(node) and _only_widens(node) and _chain_to_sum(node)) or None

    def replace(self, node: Node, found: list[Node]) -> Node:
        found[-1].update_kwarg("dtype", torch.float32)
        for link in reversed(found):
            refresh(link)
        return found[0]


def _only_widens(cast: Node) -> bool:
    source = cast.all_input_nodes[0].meta["val"]
    low = isinstance(source, torch.Tensor) and source.dtype in (torch.bfloat16, torch.float16)
    return low and cast.meta["val"].dtype == torch.float32 and cast.meta["val"].device == source.device


def _chain_to_sum(cast: Node) -> list[Node]:
    """Returns the views from a cast back to a sum, and the sum, if only the next one reads each; else []."""
    chain = [cast.all_input_nodes[0]]
    while is_view(chain[-1]) and len(chain[-1].all_input_nodes) == 1 and len(chain[-1].users) == 1:
        chain.append(chain[-1].all_input_nodes[0])
    last = chain[-1]
    return chain if last.target in _SUMS and len(last.users) == 1 and "dtype" not in last.kwargs else []

"""Runs segments of a graph on a part of their rows at a time."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import size_seen, statically_known_true
from passes.graph_pass import Pass
from passes.graphs.edit import new_call, on_stored_values
from passes.graphs.op_kinds import is_cast, op_name
from passes.graphs.verify import VerifyError, named_nodes
from passes.patterns.row_segments import RowSegment, is_part, memory_order
from passes.patterns.row_wise import RESHAPES, RowsPlace, row_operands, shape_of

aten = torch.ops.aten
_SIZED = RESHAPES - {"flatten"} | {"expand"}


@dataclass(frozen=True)
class TileRows(Pass):
    """Runs segments of a graph in tiles: on a part of the rows, then on the next, with the results concatenated.

    The operators remain the same ones, on fewer rows. All tiles read the segment's operands that have no rows, such as
    a weight, whose gradient is the sum over tiles. Each tile casts a weight itself, so that this sum is in the weight's
    dtype. `find_row_segments` returns the segments that a graph has.

    Before:
        linear: f32[6, 8] = aten.linear(x, weight)
        gelu: f32[6, 8] = aten.gelu(linear)
    After, in two tiles:
        split_with_sizes: (f32[3, 4], f32[3, 4]) = aten.split_with_sizes(x, [3, 3])
        linear_tile_0: f32[3, 8] = aten.linear(getitem, weight)
        gelu_tile_0: f32[3, 8] = aten.gelu(linear_tile_0)
        ...
        cat: f32[6, 8] = aten.cat([gelu_tile_0, gelu_tile_1], 0)
    """

    segments: tuple[RowSegment, ...]
    tiles: int
    """The number of parts that the rows of each segment are split into: equal ones, and the last with what is left."""

    def __repr__(self) -> str:
        return f"TileRows({len(self.segments)} segments, tiles={self.tiles})"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        nodes = {node.name: node for node in graph.nodes}
        with on_stored_values(graph):
            for segment in self.segments:
                nodes |= _Tiling(graph, nodes, segment, segment.tiles(self.tiles)).apply()
        return graph_module

    def requires(self, graph_module: GraphModule) -> None:
        super().requires(graph_module)
        for segment in self.segments:
            tiles = segment.tiles(self.tiles)
            if not 1 < tiles <= (size_seen(segment.rows) or 0):
                raise VerifyError(
                    segment.name, f"{segment.rows} rows cannot make {tiles} tiles", f"give 2 to {segment.rows}"
                )
            _check(graph_module.graph, segment)


def _check(graph: Graph, segment: RowSegment) -> None:
    """Raises `VerifyError` where a member of a segment does not compute its rows apart."""
    named = (*segment.inputs, *segment.members)
    nodes = named_nodes(graph, [name for name, _ in named])
    places: dict[Node, RowsPlace | None] = dict(zip(nodes, (place for _, place in named), strict=True))
    for node, (name, place) in zip(nodes[len(segment.inputs) :], segment.members, strict=True):
        operands = row_operands(node, place)
        if operands is None or any(places.get(source) != needed for source, needed in operands):
            raise VerifyError(
                name,
                "a row of its result may depend on other rows of its inputs",
                "give segments that find_row_segments returns",
            )


class _Tiling:
    """The rewriting of one segment."""

    def __init__(self, graph: Graph, nodes: Mapping[str, Node], segment: RowSegment, tiles: int) -> None:
        self.graph = graph
        self.places = {nodes[name]: place for name, place in segment.members}
        self.inputs = {nodes[name]: place for name, place in segment.inputs}
        self.outputs = [nodes[name] for name in segment.outputs]
        self.count: Any = segment.rows
        """The number of rows: a node where it is a symbol."""
        self.tiles = tiles
        self.rows: list[Any] = []
        """The number of rows of each tile."""

    def apply(self) -> dict[str, Node]:
        """Rewrites the segment, and returns the nodes that take the place of its outputs, by their names."""
        kept = self._kept()
        *_, last = self.places
        anchor = last.next
        with self.graph.inserting_before(anchor):
            self._measure()
            pieces = {source: self._split(source) for source in self.inputs}
            results: dict[Node, list[Node]] = {node: [] for node in self.outputs}
            made = self._read_in_tiles()
            for number in range(self.tiles):
                tile = self._tile(number, {source: parts[number] for source, parts in pieces.items()}, made)
                for node, parts in results.items():
                    parts.append(tile[node])
            whole = {node: self._together(node, parts) for node, parts in results.items()}
        for node, instead in whole.items():
            node.replace_all_uses_with(instead)
        for node in kept:
            anchor.prepend(node)
        for node in reversed(self.places):
            if node not in kept:
                self.graph.erase_node(node)
        return {node.name: instead for node, instead in whole.items()}

    def _kept(self) -> list[Node]:
        """Returns the views of outputs that are read outside, and what these view, in order: they stay."""
        kept: set[Node] = set()
        for node in reversed(self.places):
            if node not in self.outputs and any(user in kept or user not in self.places for user in node.users):
                kept.add(node)
        return [node for node in self.places if node in kept]

    def _read_in_tiles(self) -> list[Node]:
        """Returns the members that outputs are computed from, in order."""
        needed = set(self.outputs)
        for node in reversed(self.places):
            if node in needed:
                needed.update(source for source in node.all_input_nodes if source in self.places)
        return [node for node in self.places if node in needed]

    def _measure(self) -> None:
        """Finds the number of rows of each tile: equal ones but for the last. Symbols are computed in the graph."""
        if not isinstance(self.count, int):
            source, place = next(pair for pair in self.inputs.items() if pair[1] == RowsPlace(pair[1].dim))
            self.count = self._number(aten.sym_size.int, source, place.dim)
        few = self._number(operator.floordiv, self.count, self.tiles)
        before = self._number(operator.mul, few, self.tiles - 1)
        self.rows = [*[few] * (self.tiles - 1), self._number(operator.sub, self.count, before)]

    def _number(self, target: Any, *args: Any) -> Any:
        """Returns what a call returns for sizes: a number, or the node of the call where one of them is a node."""
        if any(isinstance(argument, Node) for argument in args):
            return new_call(next(iter(self.places)), target, *args)
        return target(*args)

    def _resized(self, number: int, size: Any, place: RowsPlace) -> Any:
        """Returns the size of a dimension with rows in tile `number`, given that in the whole."""
        if place == RowsPlace(place.dim):
            return self.rows[number]
        return self._number(operator.mul, self._number(operator.floordiv, size, self.count), self.rows[number])

    def _split(self, source: Node) -> list[Node]:
        place = self.inputs[source]
        first = next(iter(self.places))
        size: Any = shape_of(source)[place.dim]
        if not isinstance(size, int):
            size = self._number(aten.sym_size.int, source, place.dim)
        sizes = [self._resized(number, size, place) for number in range(self.tiles)]
        # One operator for all parts: the derivative of a slice would be a whole tensor with zeros around it.
        parts = new_call(first, aten.split_with_sizes.default, source, sizes, place.dim)
        return [new_call(first, operator.getitem, parts, number) for number in range(self.tiles)]

    def _tile(self, number: int, parts: dict[Node, Node], made: list[Node]) -> dict[Node, Node]:
        """Returns the calls of one tile, by the members of the segment that they are copies of."""
        copies = dict(parts)

        def read(source: Node) -> Node:
            if source not in copies and _narrows(source):
                options: dict[str, Any] = dict(source.kwargs)
                copies[source] = new_call(source, source.target, *source.args, **options)
            return copies.get(source, source)

        for node in made:
            arguments = with_rows(node, self.places[node], partial(self._resized, number))
            args, kwargs = torch.fx.map_arg((arguments, node.kwargs), read)
            copies[node] = new_call(node, node.target, *args, node_name=f"{node.name}_tile_{number}", **kwargs)
        return copies

    def _together(self, node: Node, parts: list[Node]) -> Node:
        """Returns the value of a member, put together from its tiles in the memory order that it has."""
        place, value = self.places[node], node.meta["val"]
        before, after, dim = shape_of(node)[: place.dim], shape_of(node)[place.dim + 1 :], place.dim
        merged = not statically_known_true(place.outer == 1)
        if merged:
            dim += 1
            for number, part in enumerate(parts):
                size = self._number(operator.mul, self.rows[number], place.inner)
                parts[number] = new_call(node, aten.view.default, part, [*before, -1, size, *after])
        order = memory_order(value)
        assert order is not None
        if merged:
            order = tuple(at for one in order for at in _opened(one, place.dim))
        if order == tuple(sorted(order)):
            whole = new_call(node, aten.cat.default, parts, dim)
        else:
            ordered = [new_call(node, aten.permute.default, part, list(order)) for part in parts]
            whole = new_call(node, aten.cat.default, ordered, order.index(dim))
            whole = new_call(node, aten.permute.default, whole, [order.index(at) for at in range(len(order))])
        return new_call(node, aten.view.default, whole, [*before, -1, *after]) if merged else whole


def _opened(dim: int, split: int) -> tuple[int, ...]:
    """Returns the dimensions that one becomes where dimension `split` becomes two."""
    return (dim, dim + 1) if dim == split else (dim + (dim > split),)


def _narrows(node: Node) -> bool:
    """Returns whether a call casts a value to fewer bits. A sum of gradients of its result would round more."""
    if not is_cast(node) or not isinstance(node.args[0], Node) or is_part(node):
        return False
    before: Any = node.args[0].meta["val"]
    after: Any = node.meta["val"]
    return bool(before.is_floating_point() and after.is_floating_point() and after.itemsize < before.itemsize)


def with_rows(node: Node, place: RowsPlace, resize: Callable[[Any, RowsPlace], Any]) -> tuple[Any, ...]:
    """Returns the arguments of the call `node` with the sizes among them changed to another number of rows.

    `place` is where the call's result has the rows. `resize`, called with the size of that dimension and `place`,
    returns the new size."""
    if op_name(node) not in _SIZED:
        return node.args
    sizes: Any = node.args[-1] if op_name(node) == "unflatten" else node.args[1]
    number = place.dim
    if op_name(node) == "unflatten":
        number -= int(node.args[1]) % len(shape_of(node.args[0]))  # type: ignore[arg-type]
    if not 0 <= number < len(sizes) or _is_inferred(sizes[number]):
        return node.args
    changed = [*sizes[:number], resize(sizes[number], place), *sizes[number + 1 :]]
    return tuple(changed if argument is sizes else argument for argument in node.args)


def _is_inferred(size: Any) -> bool:
    return isinstance(size, int) and size == -1

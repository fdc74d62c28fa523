"""Finds segments of a graph whose operators treat rows apart, so that they can run on a part of the rows at a time.

A segment starts with one call and a dimension of its operands, whose indices are the rows, and grows along the graph's
order. It ends in front of attention; in front of a call that reads one of its values and mixes rows, such as a
convolution; and where later calls read only one of its values, no larger than its inputs, such as a residual stream.

Each call of attention is a segment of its own, whose rows are heads: its backward sums gradients in temporary memory of
the size of all its heads.
"""

import operator
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import size_seen, statically_known_true
from passes.graphs.aliases import storages
from passes.graphs.node_facts import OPERATOR_OVERLOAD, arguments_of, may_write, tensors
from passes.graphs.op_kinds import mutated_arguments, op_name
from passes.patterns.row_wise import ATTENTION, Operands, RowsPlace, row_operands, row_result, shape_of

_MOST_MEMBERS = 200
_LEAST_SHARE = 4
"""Segments with less than this part of the inner bytes of the largest one are left as they are."""
_LEAST_GAIN = 2
"""A segment has this many times as many bytes inside as its inputs and outputs have together, at least."""


@dataclass(frozen=True)
class RowSegment:
    """A part of a graph that can run on some rows at a time: a row of its results needs that of its inputs only."""

    members: tuple[tuple[str, RowsPlace], ...]
    """The names of the calls, in order, with the place of the rows in the value of each."""
    inputs: tuple[tuple[str, RowsPlace], ...]
    """The values from outside that have these rows, each with their place."""
    outputs: tuple[str, ...]
    """The members whose memory is read outside, perhaps by views that are members, too."""
    rows: Any
    """The number of rows, which may be a symbol."""
    inside_bytes: int = field(default=0, compare=False)
    """Bytes of the values that nothing outside reads, counted once each."""
    edge_bytes: int = field(default=0, compare=False)
    """Bytes of the inputs and the outputs."""
    most_tiles: int | None = None
    """The most tiles that the segment is split into; None: as many as are asked for."""

    def tiles(self, asked: int) -> int:
        """Returns the number of tiles that the segment is split into: `asked`, or `most_tiles` if that is less."""
        return asked if self.most_tiles is None else min(asked, self.most_tiles)

    @property
    def name(self) -> str:
        """The name of the segment's last call."""
        return self.members[-1][0]

    def __str__(self) -> str:
        return f"{self.members[0][0]} to {self.name}: {len(self.members)} calls on {self.rows} rows"


def find_row_segments(graph_module: GraphModule, tiles: int, parameters: Collection[int]) -> tuple[RowSegment, ...]:
    """Returns the segments of an operator graph that are worth running in `tiles` tiles, in the graph's order. No two
    overlap. Attention runs in at most that many tiles, since their number must divide that of its heads.

    Only calls that depend on a parameter are considered; `parameters` holds the positions of parameters among the
    graph's inputs."""
    finder = _Finder(graph_module.graph, tiles, parameters)
    found = list(finder.segments())
    largest = max((segment.inside_bytes for segment in found), default=0)
    segments = [
        segment
        for segment in found
        if segment.inside_bytes * _LEAST_SHARE >= largest
        and segment.inside_bytes >= segment.edge_bytes * _LEAST_GAIN
        and segment.inside_bytes
    ]
    order = {call.name: number for number, call in enumerate(finder.calls)}
    return tuple(sorted([*segments, *finder.attention()], key=lambda segment: order[segment.name]))


def is_part(node: Node) -> bool:
    """Returns whether a call's value shares the memory of its first operand, as a view does."""
    if not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0]
    return is_part(source) if node.target is operator.getitem else not storages(node).isdisjoint(storages(source))


class _Finder:
    """The calls of a graph, those that depend on a parameter (`trained`), and the storages that calls write to."""

    def __init__(self, graph: Graph, tiles: int, parameters: Collection[int]) -> None:
        self.tiles = tiles
        self.calls = [node for node in graph.nodes if node.op == "call_function"]
        given = graph.find_nodes(op="placeholder")
        self.given = frozenset(node for number, node in enumerate(given) if number in parameters)
        self.trained: set[Node] = set(self.given)
        self.written: set[Hashable] = set()
        """Storages that a call writes to, or may."""
        self.taken: set[Node] = set()
        """The members of the segments found so far."""
        for node in self.calls:
            if not self.trained.isdisjoint(node.all_input_nodes):
                self.trained.add(node)
            known = isinstance(node.target, OPERATOR_OVERLOAD)
            for source in mutated_arguments(node) if known else node.all_input_nodes if may_write(node) else ():
                self.written |= storages(source)

    def segments(self) -> Iterator[RowSegment]:
        """Yields the longest segment from each call that is in none before it."""
        for number, call in enumerate(self.calls):
            if call in self.taken or call not in self.trained or is_part(call):
                continue
            grown = [_Growth(self, number, operand, place).grown() for operand, place in self._starts(call)]
            if any(grown):
                best = max(filter(None, grown), key=_Growth.preference)
                self.taken.update(best.places)
                yield best.segment()

    def attention(self) -> Iterator[RowSegment]:
        """Yields a segment for each call of attention that can run on some of its heads at a time. What that saves is
        temporary memory of a kernel, so that it has no bytes inside."""
        for call in self.calls:
            if op_name(call) != ATTENTION or call not in self.trained or len(shape_of(call)) < 3:
                continue
            dim = len(shape_of(call)) - 3
            arguments = arguments_of(call)
            heads, shared = (shape_of(arguments[name])[dim] for name in ("query", "key"))
            rows = heads if shared == 1 else shared
            if not isinstance(rows, int) or not isinstance(heads, int) or heads % rows:
                continue
            place = RowsPlace(dim, 1, heads // rows)
            tiles = max(number for number in range(1, min(rows, self.tiles) + 1) if not rows % number)
            operands = row_operands(call, place)
            if operands is None or tiles == 1 or not self.can_split(operands, rows) or not can_join(call, place):
                continue
            inputs = tuple((source.name, at) for source, at in operands if at is not None)
            yield RowSegment(((call.name, place),), inputs, (call.name,), rows, most_tiles=tiles)

    def can_split(self, operands: Operands, rows: Any) -> bool:
        """Returns whether operands can be split into tiles of `rows` rows where they have rows."""
        for source, place in operands:
            value = source.meta.get("val")
            if place is not None and not (
                isinstance(value, torch.Tensor)
                and statically_known_true(place.outer == 1)
                and statically_known_true(value.shape[place.dim] == rows * place.inner)
                and not self.is_written(source)
            ):
                return False
        return True

    def _starts(self, call: Node) -> Iterator[tuple[Node, RowsPlace]]:
        """Yields the dimensions of a call's operands, but for those of parameters, that may have the rows."""
        for operand in call.all_input_nodes:
            if operand not in self.given and isinstance(operand.meta.get("val"), torch.Tensor):
                for dim, size in enumerate(shape_of(operand)):
                    if (size_seen(size) or 0) >= self.tiles:
                        yield operand, RowsPlace(dim)

    def is_written(self, node: Node) -> bool:
        """Returns whether a call may write to the memory of a node's value."""
        return bool(self.written) and not self.written.isdisjoint(storages(node))


class _Growth:
    """A segment that grows from a call."""

    def __init__(self, finder: _Finder, start: int, operand: Node, place: RowsPlace) -> None:
        self.finder, self.start = finder, start
        self.rows = shape_of(operand)[place.dim]
        self.first = operand, place
        self.places: dict[Node, RowsPlace] = {}
        self.inputs: dict[Node, RowsPlace] = {}
        self.root: dict[Node, Node] = {}
        """Per member: the member that made the memory in which its value lies."""
        self.unread: dict[Node, int] = {}
        """Per root, and per input in `finder.trained`: the number of its readers that are no members, or not yet."""

    def preference(self) -> tuple[int, bool, int]:
        """Returns a key that is larger for the better of two segments. It compares the bytes inside less those at the
        edges; then whether the rows are a multiple of the tiles, as a copy is least likely then; then the number of
        rows, if that is a symbol."""
        segment = self.segment()
        even = isinstance(self.rows, int) and not self.rows % self.finder.tiles
        rows = 0 if isinstance(self.rows, int) else size_seen(self.rows) or 0
        return segment.inside_bytes - segment.edge_bytes, even, rows

    def grown(self) -> "_Growth | None":
        """Adds calls until the segment ends, and returns it; None where the first call cannot be in one."""
        for call in self.finder.calls[self.start :]:
            if self.places and self.places.keys().isdisjoint(call.all_input_nodes):
                continue
            if not self._join(call) or self._is_narrow() or len(self.places) == _MOST_MEMBERS:
                break
        return self if self.places and all(can_join(one, self.places[one]) for one in self._outputs()) else None

    def segment(self) -> RowSegment:
        """Returns the calls added so far as a `RowSegment`."""
        outputs = self._outputs()
        inside = sum(map(_bytes, set(self.root.values()).difference(outputs)))
        edges = sum(_bytes(node) for node in (*outputs, *self.inputs) if node in self.finder.trained)
        members = tuple((node.name, place) for node, place in self.places.items())
        inputs = tuple((node.name, place) for node, place in self.inputs.items())
        return RowSegment(members, inputs, tuple(node.name for node in outputs), self.rows, inside, edges)

    def _join(self, call: Node) -> bool:
        """Makes a call a member of the segment, if it can be one; returns whether it can."""
        operand, place = self.first
        if self.places:
            operand = next(source for source in call.all_input_nodes if source in self.places)
            place = self.places[operand]
        if op_name(call) == ATTENTION:
            return False
        found = row_result(call, operand, place)
        if found is None or call in self.finder.taken or self.finder.is_written(call) or not self._fits(found[1]):
            return False
        self.places[call] = found[0]
        part = is_part(call) and call.all_input_nodes[0] in self.places
        root = self.root[call] = self.root[call.all_input_nodes[0]] if part else call
        self.unread[root] = self.unread.get(root, 0) + len(call.users)
        for source, needed in found[1]:
            if source not in self.places and needed is not None and source not in self.inputs:
                self.inputs[source] = needed
                if source in self.finder.trained:
                    start = self.finder.calls[self.start]
                    self.unread[source] = sum(user.op == "call_function" and not user < start for user in source.users)
        for source in call.all_input_nodes:
            if source in self.places or source in self.unread:
                self.unread[self.root.get(source, source)] -= 1
        return True

    def _fits(self, operands: Operands) -> bool:
        """Returns whether operands that belong to the segment have the rows where it has them, and whether the others
        can be split where the call needs their rows."""
        needed_of: dict[Node, RowsPlace | None] = {}
        for source, needed in operands:
            if needed_of.setdefault(source, needed) != needed:
                return False
            if source in self.places or source in self.inputs:
                if needed != (self.places.get(source) or self.inputs[source]):
                    return False
            elif not self.finder.can_split(((source, needed),), self.rows):
                return False
        return True

    def _is_narrow(self) -> bool:
        """Returns whether all that later calls read of the segment is one value, no larger than its inputs."""
        left = [node for node, count in self.unread.items() if count]
        inputs = [_bytes(node) for node in self.inputs if node in self.finder.trained]
        return len(left) == 1 and left[0] not in self.inputs and bool(inputs) and _bytes(left[0]) <= max(inputs)

    def _outputs(self) -> list[Node]:
        """Returns the roots that are read outside, in order."""
        return [node for node in self.places if self.root[node] is node and self.unread[node]]


def can_join(node: Node, place: RowsPlace) -> bool:
    """Returns whether a value with rows at `place` can be put together from tiles: a tensor without gaps in memory, of
    which, if a view has merged the rows with a dimension in front of them, no size but their number is a symbol."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or memory_order(value) is None:
        return False
    others = (*value.shape[: place.dim], *value.shape[place.dim + 1 :], place.inner)
    return statically_known_true(place.outer == 1) or all(isinstance(size, int) for size in others)


def _bytes(node: Node) -> int:
    """Returns the bytes of a node's value, with symbolic sizes as they were captured."""
    return sum(int(size_seen(value.numel() * value.element_size()) or 0) for value in tensors(node.meta.get("val")))


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the dimensions of a tensor, the outermost in memory first; None for a tensor with gaps in memory."""
    strides = [size_seen(stride) or 0 for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
    expected: Any = 1
    for dim in reversed(order):
        alone = statically_known_true(value.shape[dim] == 1)
        if not alone and not statically_known_true(value.stride(dim) == expected):
            return None
        expected = expected * value.shape[dim]
    return tuple(order)

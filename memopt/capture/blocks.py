"""Finds runs of equal blocks in a graph: pieces that follow each other and differ in their own inputs only.

Two neighbouring blocks are equal if their calls are the same in order, with the same constants, shapes, strides and
dtypes, and if what two corresponding calls read corresponds too: it is the same value of each one's own block or of the
block before it, one input or earlier value that both blocks read, or an input that each block has for itself. If some
middle blocks are left out, a trace of the rest is then that of the whole graph but for these blocks
(`memopt.capture.stamp`). Marks on the nodes, which tracing copies, say from which node each traced one comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from memopt.compat.fakes import FakeTensor
from memopt.compat.symbols import data_symbols_of
from memopt.compat.tensors import is_wrapper, storage_key
from passes.graphs.node_facts import argument_key, sources_of, value_kind

FIRST, LAST = 3, 2
"""The numbers of blocks at the front and at the end of a run that are traced; those between them are left out.
Neighbours are compared in the middle: the first block reads other code's values; behind the last one no other block
adds to the gradients of shared values."""
TEMPLATE = FIRST - 1
"""The number of the block of which the missing ones are copies."""
_LEAST = FIRST + LAST + 1
_WINDOW = 6
"""A repetition is found where this many calls in a row recur."""
_MOST_PERIODS = 12
_MOST_ELEMENTS = 64
"""Constants of more elements are equal only where they are the same object."""


@dataclass(frozen=True, eq=False)
class BlockRun:
    """Equal blocks of a graph that follow each other."""

    blocks: tuple[tuple[fx.Node, ...], ...]
    """The calls of each block, in order."""
    own: tuple[Mapping[fx.Node, fx.Node], ...]
    """For each block: an input that only the template block reads → the input that this block reads in its place."""

    @property
    def missing(self) -> range:
        """The numbers of the blocks that are left out of the trace."""
        return range(FIRST, len(self.blocks) - LAST)

    @property
    def standing(self) -> tuple[int, ...]:
        """The numbers of the blocks that are traced: all that are not `missing`."""
        return (*range(FIRST), *range(self.missing.stop, len(self.blocks)))


def find_runs(module: fx.GraphModule, inputs: Sequence[Any], written: Collection[int] = ()) -> tuple[BlockRun, ...]:
    """The runs of at least six equal blocks in a graph, which do not overlap.

    `inputs` are the values of its placeholders, and `written` holds the numbers of those that the graph writes to. A
    block that reads one of these is equal to no other block."""
    return _Finder(module, inputs, written).runs()


class _Finder:
    """The calls of a graph, in order, and what is known of each."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], written: Collection[int]) -> None:
        self.module = module
        self.calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self.place = {node: place for place, node in enumerate(self.calls)}
        shared = Counter(storage_key(value) for value in inputs if isinstance(value, torch.Tensor))
        self.inputs: dict[fx.Node, Hashable] = {}
        """Input → a key, equal for inputs that may take each other's place in two blocks."""
        for number, (node, value) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)):
            alone = isinstance(value, torch.Tensor) and shared[storage_key(value)] == 1 and not is_wrapper(value)
            self.inputs[node] = (value_kind(value), value.is_leaf) if alone and number not in written else node
        self.written = {node for number, node in enumerate(self.inputs) if number in written}
        keys: dict[Hashable, int] = {}
        self.kinds = [keys.setdefault(self._kind(node), len(keys)) for node in self.calls]

    def runs(self) -> tuple[BlockRun, ...]:
        """The runs, those first that have the most calls in missing blocks."""
        found: list[BlockRun] = []
        taken: set[int] = set()
        stretches = sorted(self._stretches(), key=_calls_saved)
        while stretches:
            start, end, period = stretches.pop()
            within = next((place for place in range(start, end) if place in taken), None)
            if within is not None:
                stretches += [(start, within, period), (within + 1, end, period)]
            elif end - start >= _LEAST * period and (run := self._run(start, end, period)) is not None:
                first, last = self.place[run.blocks[0][0]], self.place[run.blocks[-1][-1]]
                taken.update(range(first, last + 1))
                found.append(run)
                stretches += [(start, first, period), (last + 1, end, period)]
        return tuple(found)

    def _kind(self, node: fx.Node) -> Hashable:
        """A key, equal for calls that differ at most in the values that they read."""
        value = node.meta.get("val", node.meta.get("example_value"))
        if data_symbols_of(value) or not self.written.isdisjoint(node.all_input_nodes):
            return node
        return node_kind(node, value, self.module)

    def _stretches(self) -> Iterator[tuple[int, int, int]]:
        """Yields start, end (excluded) and period of each stretch of `calls` in which every call is of the same kind as
        the one that follows it after `period` calls."""
        last: dict[tuple[int, ...], int] = {}
        gaps: Counter[int] = Counter()
        for place in range(len(self.kinds) - _WINDOW):
            window = tuple(self.kinds[place : place + _WINDOW])
            if window in last:
                gaps[place - last[window]] += 1
            last[window] = place
        common = [gap for gap, _ in gaps.most_common(_MOST_PERIODS)]
        for period in dict.fromkeys(gap * times for times in (1, 2, 3, 4) for gap in common):
            start = 0
            for place, later in enumerate(range(period, len(self.kinds) + 1)):
                if later < len(self.kinds) and self.kinds[place] == self.kinds[later]:
                    continue
                if later - start >= _LEAST * period:
                    yield start, later, period
                start = place + 1

    def _run(self, start: int, end: int, period: int) -> BlockRun | None:
        """The longest run between two positions in `calls`; None where no six blocks are equal. The first block begins
        where the fewest values go from one block to the next."""
        phases = range(start, min(start + period, end - _LEAST * period + 1))
        first = min(phases, key=lambda phase: (self._crossing(phase + 2 * period, period), phase))
        count = (end - first) // period
        pairs = [self._pair(first + number * period, period) for number in range(count - 1)]
        numbers = _longest(pairs)
        if len(numbers) < _LEAST:
            return None
        own = _own_inputs([pair.own for number in numbers[:-1] if (pair := pairs[number]) is not None])
        places = (first + number * period for number in numbers)
        blocks = tuple(tuple(self.calls[place : place + period]) for place in places)
        return BlockRun(blocks, own) if own is not None and _read_inside(blocks, own) else None

    def _crossing(self, cut: int, period: int) -> int:
        """The number of values, made by the `period` calls before the position `cut`, that calls from `cut` on read."""
        block = self.calls[cut - period : cut]
        return sum(any(self.place.get(user, cut) >= cut for user in node.users) for node in block)

    def _pair(self, place: int, period: int) -> _Pair | None:
        """Two neighbouring blocks of `period` calls each, the first of which begins at the position `place`; None where
        they are not equal."""
        own: dict[fx.Node, fx.Node] = {}
        strict = True
        for one, other in zip(
            self.calls[place : place + period], self.calls[place + period : place + 2 * period], strict=True
        ):
            for source, later in zip(sources_of(one), sources_of(other), strict=True):
                at, then = self.place.get(source, -1), self.place.get(later, -1)
                if at < 0 and then < 0 and source is not later:
                    alike = self.inputs[source] == self.inputs[later]
                    if not alike or own.setdefault(source, later) is not later:
                        return None
                elif then >= place:
                    if at != then - period and (at >= place or then >= place + period):
                        return None
                    strict &= at == then - period
                elif source is not later:
                    return None
        return _Pair(own, strict) if len(set(own.values())) == len(own) else None


@dataclass(frozen=True)
class _Pair:
    """Two neighbouring blocks that are equal."""

    own: Mapping[fx.Node, fx.Node]
    """Input that the first block reads → the other input that the second one reads in its place."""
    strict: bool
    """Whether the first block reads, of the block before it, what the second block reads of the first."""


def _longest(pairs: Sequence[_Pair | None]) -> range:
    """The numbers of the blocks of the longest run, in which all pairs but the first are strict."""
    best, begin = range(0), 0
    for number, pair in enumerate([*pairs, None]):
        if pair is None or (number > begin and not pair.strict):
            best = max(best, range(begin, number + 1), key=len)
            begin = number + 1 if pair is None else number
    return best


def _own_inputs(pairs: Sequence[Mapping[fx.Node, fx.Node]]) -> tuple[Mapping[fx.Node, fx.Node], ...] | None:
    """`BlockRun.own`, from `_Pair.own` of each two neighbours; None where an input has no counterpart in a block."""
    if any(set(one.values()) != set(other) for one, other in pairwise(pairs)):
        return None
    own: list[Mapping[fx.Node, fx.Node]] = [{node: node for node in pairs[TEMPLATE]}]
    for pair in reversed(pairs[:TEMPLATE]):
        before = {later: node for node, later in pair.items()}
        own.insert(0, {node: before[taken] for node, taken in own[0].items()})
    for pair in pairs[TEMPLATE:]:
        own.append({node: pair[taken] for node, taken in own[-1].items()})
    return tuple(own)


def _read_inside(blocks: Sequence[Sequence[fx.Node]], own: Sequence[Mapping[fx.Node, fx.Node]]) -> bool:
    """Whether a block's own inputs are read by that block only, and the values that it makes by itself and the next
    block only. The values of the last block may be read by whatever follows."""
    number_of = {node: number for number, block in enumerate(blocks) for node in block}
    last = len(blocks) - 1
    for number, block in enumerate(blocks):
        for node in block if number < last else ():
            if any(number_of.get(user) not in (number, number + 1) for user in node.users):
                return False
        if any(number_of.get(user) != number for node in own[number].values() for user in node.users):
            return False
    return True


def _calls_saved(stretch: tuple[int, int, int]) -> int:
    """The number of calls in the blocks of a stretch that need not be traced."""
    start, end, period = stretch
    return ((end - start) // period - FIRST - LAST) * period


def node_kind(node: fx.Node, value: Any, module: fx.GraphModule) -> tuple[Hashable, ...]:
    """A key of a node in the graph of `module` with this value, equal for nodes that differ only in what they read."""
    target = constant_key(attrgetter(str(node.target))(module)) if node.op == "get_attr" else node.target
    return node.op, target, argument_key((node.args, node.kwargs), alike=True), value_kind(value)


def constant_key(value: Any) -> Hashable:
    """A key, equal for constants that tracing cannot tell apart: two small tensors with the same elements. The key of
    any other constant, such as the graph that a higher-order operator runs, equals no other constant's."""
    if isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor) or value.numel() > _MOST_ELEMENTS:
        return type(value), id(value)
    return value_kind(value), repr(value.tolist())


_OPERATOR = "memopt_operator"
"""The entry of `node.meta["custom"]` with the name of the node that a node was traced from."""


def mark_operators(graph: fx.Graph) -> None:
    """Write into the metadata of each node its own name. Tracers copy this entry to every node that they make from that
    node, in the backward too; `traced_from` reads the copy."""
    for node in graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), _OPERATOR: node.name}


def without_mark(node: fx.Node, mark: str = _OPERATOR) -> None:
    """Remove a mark from a traced node, by default the name that `mark_operators` wrote and tracing copied."""
    custom = {name: value for name, value in node.meta.get("custom", {}).items() if name != mark}
    node.meta.update(custom=custom) if custom else node.meta.pop("custom", None)


def traced_from(node: fx.Node) -> str:
    """The name of the node that `node` was traced from, which `mark_operators` wrote before the trace; "" for a node
    without this mark."""
    return str(node.meta.get("custom", {}).get(_OPERATOR, ""))

"""Rolls up loops over the rows of logits, in which authors compute a loss sample by sample, or some rows at a time.

In a graph such a loop is unrolled: each iteration has its own calls, and `stack` or `cat` joins their results. What it
joins is computed for all rows at once instead, by the same operators.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from passes.compat import schema_of, statically_known_true
from passes.graphs.edit import erase_unread, new_call
from passes.graphs.node_facts import argument_key, arguments_of, is_pure, same_sizes
from passes.graphs.op_kinds import broadcasts, is_cast, mutated_arguments, op_name
from passes.patterns.row_region import REDUCTIONS
from passes.rewrite_pattern import NoMatch, check_unwritten

_OF_CLASSES = frozenset({"softmax", "log_softmax", "logsumexp"})
_ROW_WISE = _OF_CLASSES | REDUCTIONS | {"gather", "squeeze", "unsqueeze", "clone", "detach"}
_SPLITS = frozenset({"split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"})


def roll_loops(graph: Graph) -> list[Node]:
    """Replaces each unrolled loop over rows of logits, whose results `stack` or `cat` joins along dimension 0, by one
    computation for all rows. Returns the calls of these. To be called within `on_stored_values`."""
    made: list[Node] = []
    for node in ends_of_loops(graph):
        given: Any = node.args[0]
        loop = _Loop(node, samples=op_name(node) == "stack")
        whole = loop.rolled(tuple(given))
        if whole is None or loop.is_written_to() or not same_sizes(whole.meta["val"].shape, node.meta["val"].shape):
            erase_unread(reversed(loop.made))
            continue
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
        erase_unread(given)
        made += loop.made
    return made


def ends_of_loops(graph: Graph) -> list[Node]:
    """Returns the calls, `stack` or `cat`, that may join the results of a loop over rows of logits."""
    found = []
    for node in graph.nodes:
        given: Any = node.args[0] if op_name(node) in ("stack", "cat") and arguments_of(node)["dim"] == 0 else ()
        alike = len(given) > 1 and all(isinstance(one, Node) and one.target is given[0].target for one in given)
        if alike and _reads_classes(given[0], depth=8):
            found.append(node)
    return found


def _reads_classes(node: Node, depth: int) -> bool:
    if op_name(node) in _OF_CLASSES:
        return True
    return depth > 0 and any(_reads_classes(source, depth - 1) for source in node.all_input_nodes[:2])


class _Loop:
    """A loop, unrolled in the graph, that ends in the call `end`, which joins the results of its turns. A turn computes
    one sample (`samples`, joined by `stack`) or a part of some rows (joined by `cat`)."""

    def __init__(self, end: Node, samples: bool) -> None:
        self.end, self.samples = end, samples
        self.made: list[Node] = []
        self.known: dict[tuple[Node, ...], Node | None] = {}
        """By the calls that correspond to each other, one of each turn: their values for all rows, or None."""

    def is_written_to(self) -> bool:
        """Returns whether a call between the first turn and the end writes to what the turns read."""
        read = {source for turns in self.known for call in turns for source in call.all_input_nodes}
        try:
            check_unwritten(read, min(min(turns) for turns in self.known), self.end)
        except NoMatch:
            return True
        return False

    def rolled(self, nodes: tuple[Node, ...]) -> Node | None:
        """Returns a node that computes for all rows what `nodes`, one call of each turn, compute for theirs: a node
        that the graph has, or a call that is added to it. None if no operator computes that."""
        if nodes not in self.known:
            self.known[nodes] = self._source(nodes) or self._call(nodes)
        return self.known[nodes]

    def _source(self, nodes: tuple[Node, ...]) -> Node | None:
        """Returns the value that the loop runs over, if `nodes` are its samples or parts in order; else None."""
        first, source = nodes[0], nodes[0].args[0] if nodes[0].args else None
        if not isinstance(source, Node) or any(node.args[:1] != (source,) for node in nodes):
            return None
        if op_name(first) == "select" and self.samples:
            turns = [node.args[1:] for node in nodes]
            every = statically_known_true(source.meta["val"].shape[0] == len(nodes))
            return source if every and turns == [(0, turn) for turn in range(len(nodes))] else None
        if op_name(first) == "slice" and not self.samples:
            return source if _covers(nodes, source) else None
        if first.target is not operator.getitem or len(source.meta["val"]) != len(nodes):
            return None
        fits = op_name(source) in (("unbind",) if self.samples else _SPLITS) and arguments_of(source)["dim"] == 0
        ordered = [node.args[1] for node in nodes] == list(range(len(nodes)))
        over: Any = source.args[0]
        return over if fits and ordered else None

    def _call(self, nodes: tuple[Node, ...]) -> Node | None:
        """Makes for all rows the call that `nodes` are in the turns, and returns it; None if that is not possible."""
        first = nodes[0]
        known = broadcasts(first) or is_cast(first) or op_name(first) in _ROW_WISE
        alike = all(node.target is first.target and len(node.args) == len(first.args) for node in nodes)
        if not known or not alike or not is_pure(first) or mutated_arguments(first) or not self._aligns(nodes):
            return None
        if any(node.kwargs.keys() != first.kwargs.keys() for node in nodes):
            return None
        names = [argument.name for argument in schema_of(first.target).arguments]
        args = [self._argument([node.args[at] for node in nodes], names[at], first) for at in range(len(first.args))]
        kwargs = {key: self._argument([node.kwargs[key] for node in nodes], key, first) for key in first.kwargs}
        reduces = op_name(first) in REDUCTIONS and "dim" not in (*names[: len(args)], *kwargs)
        if reduces or _DIFFERENT in (*args, *kwargs.values()):
            return None
        with self.end.graph.inserting_before(self.end):
            call = new_call(first, first.target, *args, **kwargs)
        self.made.append(call)
        return call

    def _aligns(self, nodes: tuple[Node, ...]) -> bool:
        """Returns whether, in each turn, the operands that not all turns share have equally many dimensions, and for
        parts equally many rows. Otherwise they would be broadcast in another way for all rows than in a turn."""
        shared = set(nodes[0].all_input_nodes).intersection(*[node.all_input_nodes for node in nodes])
        for node in nodes:
            own = [source.meta.get("val") for source in node.all_input_nodes if source not in shared]
            shapes = [value.shape for value in own if isinstance(value, torch.Tensor)]
            if any(len(shape) != len(shapes[0]) for shape in shapes):
                return False
            if not self.samples and any(not same_sizes(shape[:1], shapes[0][:1]) for shape in shapes):
                return False
        return True

    def _argument(self, given: Sequence[Any], name: str, first: Node) -> Any:
        """Returns the argument `name` of the call for all rows, given those of the turns; `_DIFFERENT` without one."""
        one = given[0]
        if all(isinstance(other, Node) and isinstance(other.meta.get("val"), torch.Tensor) for other in given):
            same = all(other is one for other in given) and one.meta["val"].dim() == 0
            return one if same else self.rolled(tuple(given)) or _DIFFERENT
        if len({argument_key(other) for other in given}) > 1 or isinstance(one, Node):
            return _DIFFERENT
        if name != "dim":
            return one
        if one is None or one == []:
            return _DIFFERENT
        source: Any = first.args[0]
        rank = source.meta["val"].dim() + (op_name(first) == "unsqueeze")
        dims = [dim if dim < 0 else dim - rank for dim in (one if isinstance(one, (list, tuple)) else [one])]
        if not self.samples and -rank in dims:
            return _DIFFERENT
        return dims if isinstance(one, (list, tuple)) else dims[0]


_DIFFERENT = object()
"""Stands for an argument that the call for all rows cannot have, since it differs from turn to turn."""


def _covers(slices: Sequence[Node], source: Node) -> bool:
    """Returns whether slices take all rows of a value, one after the other."""
    at: Any = 0
    for part in slices:
        given = arguments_of(part)
        end = given["end"]
        if given["dim"] != 0 or (given["start"] or 0) != at or given["step"] != 1 or not isinstance(end, int):
            return False
        at = end
    return statically_known_true(source.meta["val"].shape[0] <= at)

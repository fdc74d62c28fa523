"""Calls that free more than they make go first: weight gradients before the gradients that are passed on."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import Block, find_aliases
from passes.graphs.node_facts import is_pure
from passes.graphs.op_kinds import is_view


@dataclass(frozen=True)
class FreeFirst(Pass):
    """Moves a call that frees more than it makes in front of calls that make more than they free.

    At no call, wherever it comes to stand, is more memory held than at the same call before, whatever the temporaries
    of its kernel. Within the runs of nodes that are tagged alike (`meta["partitioner_tag"]`) only, and past pure calls
    only. What it frees becomes a lower peak where `Reinplace` follows: the weight gradient of a layer frees the input
    that it reads, so that the gradient that is passed on can then be turned in place beside less.

    Before:
        passed: f32[8, 16] = aten.mm(gradient, weight)
        of_weight: f32[4, 16] = aten.mm(transposed, activation)
    After:
        of_weight: f32[4, 16] = aten.mm(transposed, activation)
        passed: f32[8, 16] = aten.mm(gradient, weight)
    """

    graph: ClassVar[GraphKind] = "joint"

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        memory = _Memory(graph)
        for run in list(_runs(graph)):
            calls = [node for node in run if not _follows(node)]
            if calls and (order := _Order(calls, memory)).settle():
                _emit(order.calls, run)
        return graph_module


def _follows(node: Node) -> bool:
    """Whether a node only names what a call has made."""
    return node.op == "get_attr" or node.target is operator.getitem or is_view(node)


def _runs(graph: Graph) -> Iterator[list[Node]]:
    """Nodes in a row that are of one half, as their tags say, without inputs and the output."""
    run: list[Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if run and node.meta.get("partitioner_tag") != run[-1].meta.get("partitioner_tag"):
            yield run
            run = []
        run.append(node)
    if run:
        yield run


class _Memory:
    """Which blocks of memory the calls of a graph make, read and depend on, and their bytes.

    Blocks that are there before the graph runs are never freed, and not listed. Nor are the elements of tuples that
    nothing takes out.
    """

    def __init__(self, graph: Graph) -> None:
        aliases = find_aliases(graph)
        held = {block for node, blocks in aliases.of.items() if _is_tensor(node) for block in blocks}
        self.bytes = {block: _bytes(aliases.blocks[block]) for block in held if _is_made_here(aliases.blocks[block])}
        self.made: dict[Node, list[int]] = {}
        self.read: dict[Node, set[int]] = {}
        self.readers: dict[int, set[Node]] = {}
        self.depends: dict[Node, set[Node]] = {}
        for node in graph.nodes:
            self.depends[node] = {call for source in node.all_input_nodes for call in self._calls(source)}
            if _follows(node):
                continue
            self.made[node] = [block for block in aliases.made_by(node) if block in self.bytes]
            self.read[node] = self.bytes.keys() & set(aliases.read_by(node))
            for block in self.read[node]:
                self.readers.setdefault(block, set()).add(node)
        self.returned = self.read[graph.output_node()]

    def _calls(self, node: Node) -> set[Node]:
        return self.depends[node] if _follows(node) else {node}


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_made_here(block: Block) -> bool:
    return block.maker.op in ("call_function", "call_module")


def _bytes(block: Block) -> int | None:
    """None where a size is a symbol."""
    size = block.value.numel() * block.value.element_size()
    return size if isinstance(size, int) else None


class _Order:
    """The calls of one run, in an order that gets better."""

    def __init__(self, calls: list[Node], memory: _Memory) -> None:
        self.calls, self.memory = calls, memory
        self.place = {node: place for place, node in enumerate(calls)}
        self.first = calls[0]

    def settle(self) -> bool:
        """Moves every call as far to the front as it pays; whether any was moved."""
        moved = False
        for call in list(self.calls):
            while self.place[call] and self._pays(call, self.calls[self.place[call] - 1]):
                self._swap(self.place[call] - 1)
                moved = True
        return moved

    def _swap(self, place: int) -> None:
        self.calls[place : place + 2] = self.calls[place : place + 2][::-1]
        for each in (place, place + 1):
            self.place[self.calls[each]] = each

    def _pays(self, call: Node, before: Node) -> bool:
        """Whether a call is better in front of the one before it: it frees more than it makes there, and the other
        leaves behind at least what it frees."""
        memory = self.memory
        if before in memory.depends[call] or not (is_pure(call) and is_pure(before)):
            return False
        own = {block for block in self._freed(call) if before not in memory.readers[block]}
        sizes = [self._sum(each) for each in (own, memory.made.get(call, ()), self._left(before), self._freed(before))]
        if None in sizes:
            return False
        freed, made, left, freed_before = (size or 0 for size in sizes)
        return freed > made and left >= freed_before

    def _freed(self, call: Node) -> set[int]:
        """Blocks that the call is the last to read."""
        return {block for block in self.memory.read[call] - self.memory.returned if self._is_last(call, block)}

    def _is_last(self, call: Node, block: int) -> bool:
        """Whether all that read a block stand up to the call, or in front of the run."""
        return all(
            self.place[each] <= self.place[call] if each in self.place else each < self.first
            for each in self.memory.readers[block]
        )

    def _left(self, call: Node) -> set[int]:
        """Blocks that the call makes and does not lose at once."""
        made = set(self.memory.made.get(call, ()))
        return {block for block in made if block in self.memory.returned or self.memory.readers.get(block)}

    def _sum(self, blocks: Iterable[int]) -> int | None:
        sizes = [self.memory.bytes[block] for block in blocks]
        return None if None in sizes else sum(size or 0 for size in sizes)


def _emit(calls: list[Node], run: list[Node]) -> None:
    """Put the nodes of a run in the order of its calls: what only names memory stands where it is first read, elements
    right behind their call."""
    behind, left = run[-1].next, set(run)

    def place(node: Node) -> None:
        if node not in left:
            return
        left.discard(node)
        for source in node.all_input_nodes:
            if _follows(source):
                place(source)
        behind.prepend(node)
        for user in list(node.users):
            if user.target is operator.getitem:
                place(user)

    for call in calls:
        place(call)
    for node in run:
        place(node)

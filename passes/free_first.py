"""Reorders calls so that those that free more memory than they make go first, such as weight gradients."""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import size_seen
from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import Block, find_aliases
from passes.graphs.node_facts import is_pure
from passes.graphs.op_kinds import is_view


@dataclass(frozen=True)
class FreeFirst(Pass):
    """Moves a call that frees more than it makes in front of calls that make more than they free.

    At every call no more memory is held than at the same call before, so that the peak does not rise whatever
    temporaries kernels need; for symbolic sizes, that is so for the values that they were captured with. Calls move
    past pure calls only, within the forward or the backward (`meta["partitioner_tag"]`). Where `Reinplace` follows the
    peak falls: the weight gradient of a layer frees the input that it reads before the gradient that is passed on is
    overwritten.

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
    """Returns whether a node only names memory that a call has made."""
    return node.op == "get_attr" or node.target is operator.getitem or is_view(node)


def _runs(graph: Graph) -> Iterator[list[Node]]:
    """Yields consecutive nodes with the same tag, without inputs and the output."""
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
    """Returns the bytes of a block, with symbolic sizes as they were captured; None where a size depends on data."""
    return size_seen(block.value.numel() * block.value.element_size())


class _Order:
    """The order of the calls of one run, which is improved step by step."""

    def __init__(self, calls: list[Node], memory: _Memory) -> None:
        self.calls, self.memory = calls, memory
        self.place = {node: place for place, node in enumerate(calls)}
        self.first = calls[0]

    def settle(self) -> bool:
        """Moves every call forward as far as it pays; returns whether any was moved."""
        moved = False
        for call in list(self.calls):
            while self.place[call] and self._pays(call, self.calls[self.place[call] - 1]):
                self._swap(self.place[call] - 1)
                moved = True
        return moved

    def _swap(self, place: int) -> None:
        self.calls[place : place + 2] = self.calls[place : place + 2][::-1]
        for moved in (place, place + 1):
            self.place[self.calls[moved]] = moved

    def _pays(self, call: Node, before: Node) -> bool:
        """Returns whether a call should go before its predecessor.

        It should if it frees more than it makes there, and the predecessor makes at least as much as it frees.
        """
        memory = self.memory
        if before in memory.depends[call] or not (is_pure(call) and is_pure(before)):
            return False
        own = {block for block in self._freed(call) if before not in memory.readers[block]}
        counted = (own, memory.made.get(call, ()), self._left(before), self._freed(before))
        sizes = [self._sum(blocks) for blocks in counted]
        if None in sizes:
            return False
        freed, made, left, freed_before = (size or 0 for size in sizes)
        return freed > made and left >= freed_before

    def _freed(self, call: Node) -> set[int]:
        """Returns the blocks that the call is the last to read."""
        return {block for block in self.memory.read[call] - self.memory.returned if self._is_last(call, block)}

    def _is_last(self, call: Node, block: int) -> bool:
        """Returns whether no reader of a block comes after the call."""
        return all(
            self.place[reader] <= self.place[call] if reader in self.place else reader < self.first
            for reader in self.memory.readers[block]
        )

    def _left(self, call: Node) -> set[int]:
        """Returns the blocks that a call makes and that something reads or the graph returns."""
        made = set(self.memory.made.get(call, ()))
        return {block for block in made if block in self.memory.returned or self.memory.readers.get(block)}

    def _sum(self, blocks: Iterable[int]) -> int | None:
        sizes = [self.memory.bytes[block] for block in blocks]
        return None if None in sizes else sum(size or 0 for size in sizes)


def _emit(calls: list[Node], run: list[Node]) -> None:
    """Puts the nodes of a run in the order of its calls.

    Views stand where they are first read, elements of a tuple right behind its call.
    """
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

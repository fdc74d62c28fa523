"""Makes calls reuse memory: those that free more than they make go first, such as weight gradients; and elementwise
ones write their result over an operand that nothing reads any more."""

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from passes.compat import size_seen
from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import Aliases, find_aliases, find_cautious_aliases
from passes.graphs.node_facts import is_pure, same_sizes
from passes.graphs.op_kinds import inplace_variants, is_view
from passes.graphs.verify import VerifyError, named_nodes


def find_reuses(graph_module: GraphModule, among: Collection[Node] | None = None) -> tuple[tuple[str, str], ...]:
    """Returns the calls that `Reinplace` rewrites, in the graph's order, as pairs of names: of the call, and of the
    operand that it writes its result over.

    With `among`, only those calls that are in it, and that write over memory which a node in it makes."""
    return tuple((node.name, operand.name) for node, operand, *_ in _reuses(graph_module, among))


@dataclass(frozen=True)
class Reinplace(Pass):
    """Makes elementwise calls write over an operand that is not read later, by their in-place or `out=` variant.

    For forward and backward graphs that run as they are and are not differentiated, after all other passes. The
    operand's memory is made in the graph by a call that is known to make new memory, has the size and layout of the
    result, and is not read later under any name. Inputs and outputs are never written over. Results are the same bit
    for bit, and no more memory is held at any time. `reuses` names the calls to rewrite and their operands, as
    `find_reuses` does; None: all that can be.

    Before:
        mm: f32[4, 2] = aten.mm(x, weight)
        relu: f32[4, 2] = aten.relu(mm)
        add: f32[4, 2] = aten.add.Tensor(x, relu)
    After:
        mm: f32[4, 2] = aten.mm(x, weight)
        relu: f32[4, 2] = aten.relu_(mm)
        add: f32[4, 2] = aten.add.out(x, relu, out=relu)
    """

    graph: ClassVar[GraphKind] = "joint"

    reuses: tuple[tuple[str, str], ...] | None = None

    def rewrite(self, graph_module: GraphModule) -> GraphModule:
        found = _reuses(graph_module) if self.reuses is None else _named(graph_module, self.reuses)
        for node, operand, target, out in list(found):
            node.target = target
            if out:
                node.kwargs = {**node.kwargs, out: operand}
        return graph_module


_Reuse: TypeAlias = tuple[Node, Node, Any, str]
"""A call, the operand that it writes over, and the variant of its operator that does so (see `inplace_variants`)."""


def _reuses(graph_module: GraphModule, among: Collection[Node] | None = None) -> list[_Reuse]:
    """Returns all reuses, found in the graph before any is made. They do not disturb each other: no later call reads a
    block that is written over under an old name, and the result counts as new memory."""
    aliases = find_cautious_aliases(graph_module.graph)
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    found = (next(_of(node, aliases, among), None) for node in calls if among is None or node in among)
    return [reuse for reuse in found if reuse is not None]


def _named(graph_module: GraphModule, wanted: Sequence[tuple[str, str]]) -> Iterator[_Reuse]:
    aliases = find_cautious_aliases(graph_module.graph)
    for call, (name, operand) in zip(
        named_nodes(graph_module.graph, [name for name, _ in wanted]), wanted, strict=True
    ):
        reuse = next((reuse for reuse in _of(call, aliases) if reuse[1].name == operand), None)
        if reuse is None:
            raise VerifyError(name, f"it cannot write over {operand}", "give reuses that find_reuses returns")
        yield reuse


def _of(node: Node, aliases: Aliases, among: Collection[Node] | None = None) -> Iterator[_Reuse]:
    """Yields the operands that a call can write over, in memory that is made by one of the nodes `among`."""
    for target, out in inplace_variants(node.target):
        for operand in node.args if out else node.args[:1]:
            if not isinstance(operand, Node) or (block := aliases.own_block(operand)) is None:
                continue
            if among is not None and aliases.blocks[block].maker not in among:
                continue
            if _dies(node, operand, block, aliases) and _fits(node, operand, aliases.blocks[block].value):
                yield node, operand, target, out


def _dies(node: Node, operand: Node, block: int, aliases: Aliases) -> bool:
    """Returns whether the call is the last to read the operand's memory, and reads it under this name alone."""
    if node < aliases.last_reader[block]:
        return False
    return not any(block in aliases.of[source] for source in node.all_input_nodes if source is not operand)


def _fits(node: Node, operand: Node, whole: torch.Tensor) -> bool:
    """Returns whether the operand covers its memory, `whole`, every element once, and the result has its layout."""
    result, value = node.meta["val"], operand.meta["val"]
    return (
        result.is_floating_point()
        and (result.dtype, result.device) == (value.dtype, value.device)
        and same_sizes(result.shape, value.shape)
        and same_sizes(result.stride(), value.stride())
        and value.dtype == whole.dtype
        and same_sizes([value.numel()], [whole.numel()])
        and _is_dense(value)
        and _is_dense(whole)
    )


def _is_dense(value: torch.Tensor) -> bool:
    """Returns whether a tensor's elements are contiguous in memory in some order of its dimensions."""
    if value.layout != torch.strided or isinstance(value.storage_offset(), torch.SymInt) or value.storage_offset():
        return False
    expected: Any = 1
    left = [
        (size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if not same_sizes([size], [1])
    ]
    while left:
        inner = next((place for place, (_, stride) in enumerate(left) if same_sizes([stride], [expected])), None)
        if inner is None:
            return False
        expected = expected * left.pop(inner)[0]
    return True


@dataclass(frozen=True)
class FreeFirst(Pass):
    """Moves a call that frees more bytes than it makes in front of calls that make at least as many as they free.

    At every call no more memory is held than at the same call without the pass, so that the peak does not rise whatever
    temporaries kernels need; for symbolic sizes, that is so for the values that they were captured with. Calls move
    past pure calls only, within the forward or the backward (`meta["partitioner_tag"]`). With `Reinplace` after it the
    peak falls: a layer's weight gradient is computed, and the activation that it reads freed, before the gradient of
    the layer's input is made and written over.

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
        for run in _runs(graph):
            calls = [node for node in run if not _follows(node)]
            if calls and (order := _Order(calls, memory)).settle():
                _emit(order.calls, run)
        return graph_module


def _follows(node: Node) -> bool:
    """Returns whether a node makes no memory: a constant, an element of a tuple, or a view."""
    return node.op == "get_attr" or node.target is operator.getitem or is_view(node)


def _runs(graph: Graph) -> list[list[Node]]:
    """Returns consecutive nodes with the same tag, without inputs and the output."""
    nodes = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return [list(run) for _, run in groupby(nodes, lambda node: node.meta.get("partitioner_tag"))]


class _Memory:
    """Memory blocks that the calls of a graph make, read and depend on, and their bytes. Blocks that are there
    before the graph runs are never freed, and not listed. Nor are the elements of tuples that nothing takes out."""

    def __init__(self, graph: Graph) -> None:
        aliases = find_aliases(graph)
        named = [node for node in aliases.of if isinstance(node.meta.get("val"), torch.Tensor)]
        held = {block: aliases.blocks[block] for node in named for block in aliases.of[node]}
        # With symbolic sizes as they were captured; None where a size depends on data.
        self.bytes = {
            block: size_seen(made.value.numel() * made.value.element_size())
            for block, made in held.items()
            if made.maker.op in ("call_function", "call_module")
        }
        self.made: dict[Node, list[int]] = {}
        self.read: dict[Node, set[int]] = {}
        self.readers: dict[int, set[Node]] = {}
        self.depends: dict[Node, set[Node]] = {}
        for node in graph.nodes:
            calls = (self.depends[source] if _follows(source) else {source} for source in node.all_input_nodes)
            self.depends[node] = set[Node]().union(*calls)
            if _follows(node):
                continue
            self.made[node] = [block for block in aliases.made_by(node) if block in self.bytes]
            self.read[node] = self.bytes.keys() & set(aliases.read_by(node))
            for block in self.read[node]:
                self.readers.setdefault(block, set()).add(node)
        self.returned = self.read[graph.output_node()]


class _Order:
    """The order of the calls of one run, which is improved step by step."""

    def __init__(self, calls: list[Node], memory: _Memory) -> None:
        self.calls, self.memory = calls, memory
        self.place = {node: place for place, node in enumerate(calls)}
        self.first = calls[0]

    def settle(self) -> bool:
        """Moves every call ahead of its predecessors as far as it pays; returns whether any was moved."""
        moved = False
        for call in list(self.calls):
            while (place := self.place[call]) and self._pays(call, before := self.calls[place - 1]):
                self.calls[place - 1 : place + 1] = [call, before]
                self.place[call], self.place[before] = place - 1, place
                moved = True
        return moved

    def _pays(self, call: Node, before: Node) -> bool:
        """Returns whether a call should go before its predecessor. It should if it frees more than it makes there, and
        the predecessor makes at least as much as it frees."""
        memory = self.memory
        if before in memory.depends[call] or not (is_pure(call) and is_pure(before)):
            return False
        own = {block for block in self._freed(call) if before not in memory.readers[block]}
        # What it makes that something reads or the graph returns.
        left = {block for block in memory.made.get(before, ()) if block in memory.returned or memory.readers.get(block)}
        counted: list[Iterable[int]] = [own, memory.made.get(call, ()), left, self._freed(before)]
        if any(memory.bytes[block] is None for blocks in counted for block in blocks):
            return False
        freed, made, kept, freed_before = (sum(memory.bytes[block] or 0 for block in blocks) for blocks in counted)
        return freed > made and kept >= freed_before

    def _freed(self, call: Node) -> set[int]:
        """Returns the blocks that the call is the last to read."""

        def is_before(reader: Node) -> bool:
            return self.place[reader] <= self.place[call] if reader in self.place else reader < self.first

        read = self.memory.read[call] - self.memory.returned
        return {block for block in read if all(map(is_before, self.memory.readers[block]))}


def _emit(calls: list[Node], run: list[Node]) -> None:
    """Puts a run in the order of its calls: views where they are first read, elements of a tuple behind its call."""
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

"""Makes elementwise calls write their result over an operand that nothing reads any more."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch.fx import GraphModule, Node

from passes.graph_pass import GraphKind, Pass
from passes.graphs.aliases import Aliases, find_cautious_aliases
from passes.graphs.node_facts import same_sizes
from passes.graphs.op_kinds import inplace_variants
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

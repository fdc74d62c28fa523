"""The standing blocks of runs of equal blocks: those that a joint graph, or an operator graph, was traced with. They
may prove what the missing blocks, left out of the trace, would be.

In the joint graph, the forward and the backward of each standing block are found by the operators that they were traced
from; an operator graph has forwards only. The proof compares each block in the middle with the next one. Their nodes
must be equal. What two corresponding nodes read must be one value of other code, or two values at the same place: each
in the node's own block, in the block before or after it, or among the block's own inputs. Each further block would then
be traced alike, since it begins with equal values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from memopt.capture.blocks import TEMPLATE, BlockRun, node_kind, traced_from
from memopt.compat.tensors import storage_key
from passes.graphs.node_facts import graph_results, is_tangent, sources_of, tensors


class BlockPlace(NamedTuple):
    """Where a node of the joint graph belongs: to which run of equal blocks, forward or backward, which block of the
    run, and which node of the block."""

    run: int
    backward: bool
    block: int
    """The number of the block among the standing ones."""
    number: int
    """The number of the node in the forward, or the backward, of the block."""

    def of_block(self, block: int) -> BlockPlace:
        """The same place in another block."""
        return BlockPlace(self.run, self.backward, block, self.number)


class _InputRole(NamedTuple):
    """The role of an input in one block: the number of the run, that of the block among those that were traced, and the
    input of the same role in the template, the block of which the others are copies."""

    run: int
    block: int
    template: fx.Node

    def of_block(self, block: int) -> _InputRole:
        """The same role in another block."""
        return _InputRole(self.run, block, self.template)


@dataclass(frozen=True, eq=False)
class Standing:
    """A joint graph that was traced with only some blocks of each run of equal blocks (the standing blocks), and which
    of its nodes belong to which block."""

    joint: fx.GraphModule
    forward_outputs: int
    module: fx.GraphModule
    """The module that the joint graph was traced from, with all blocks."""
    runs: tuple[BlockRun, ...]
    place: dict[fx.Node, BlockPlace] = field(default_factory=dict)
    pieces: dict[tuple[int, bool, int], list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    """The nodes of the forward or the backward of a standing block, by (run, whether it is the backward, block)."""
    inputs: tuple[fx.Node, ...] = ()
    """The inputs of the joint graph that stand for those of the module, in order."""
    role: dict[fx.Node, _InputRole] = field(default_factory=dict)
    """By input that is a standing block's own."""
    makers: dict[int, tuple[fx.Node, int]] = field(default_factory=dict)
    """By the key of a storage: the first node whose value has a tensor in it, and that tensor's number in the value."""

    def half(self, run: int, backward: bool, block: int) -> list[fx.Node]:
        """The nodes of the forward, or with `backward` of the backward, of a standing block; empty where it has none.
        `run` is an index into `runs`, `block` the number of the block among the five standing ones of that run."""
        return self.pieces.get((run, backward, block), [])

    def made_by(self, tensor: torch.Tensor) -> tuple[fx.Node, int]:
        """The first node in the graph whose value has a tensor in the storage of `tensor`, and the number of that
        tensor among those in the node's value."""
        return self.makers[storage_key(tensor)]


def standing_blocks(
    joint: fx.GraphModule, forward_outputs: int, module: fx.GraphModule, runs: tuple[BlockRun, ...]
) -> Standing | None:
    """Find the standing blocks, which were traced, in a joint graph that was traced without the missing blocks in the
    middle of each of `runs`. `forward_outputs` is the number of the graph's leading results that are the forward's,
    `module` the region's module with all blocks. None where the standing blocks do not prove that the missing ones are
    equal to them."""
    nodes = joint.graph.find_nodes(op="placeholder")
    inputs = tuple(node for node in nodes if not is_tangent(node))
    given = module.graph.find_nodes(op="placeholder")
    results = graph_results(joint.graph)
    if len(inputs) != len(given) or len(results) not in (forward_outputs, forward_outputs + len(inputs)):
        return None
    found = Standing(joint, forward_outputs, module, runs, inputs=inputs)
    stands_for = dict(zip(given, inputs, strict=True))
    for number, run in enumerate(runs):
        for block, of_run in enumerate(run.standing):
            for role, own in run.own[of_run].items():
                found.role[stands_for[own]] = _InputRole(number, block, role)
    if not _set_places(found):
        return None
    for node in joint.graph.nodes:
        for number, tensor in enumerate(tensors(node.meta.get("val"))):
            if tensor.layout is not torch.strided:
                return None
            found.makers.setdefault(storage_key(tensor), (node, number))
    equal = all(_equal_in_run(found, run) for run in range(len(runs)))
    return found if equal and _read_nearby(found) and _gradients_alike(found) else None


def _set_places(found: Standing) -> bool:
    """Find the place of each node of the joint graph. A node without a mark (`traced_from`), such as a sum of
    gradients, belongs to the block of the node before it. Arithmetic on sizes that other code reads too is in no block.

    Returns False where the forward or backward of a block is not in one piece, where blocks are not in order, and where
    such arithmetic begins in the first block traced after the missing ones: with all blocks traced, it would begin in
    another."""
    owner = {
        node.name: (number, block)
        for number, run in enumerate(found.runs)
        for block, of_run in enumerate(run.standing)
        for node in run.blocks[of_run]
    }
    order: list[tuple[int, bool, int]] = []
    before: tuple[int, bool, int] | None = None
    for node in found.joint.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        name, backward = traced_from(node), node.meta.get("partitioner_tag") == "is_backward"
        key = before if before is not None and before[1] == backward else None
        if name:
            key = (owned[0], backward, owned[1]) if (owned := owner.get(name)) is not None else None
        if key is not None:
            if key != before:
                order.append(key)
            found.place[node] = BlockPlace(*key, len(found.pieces[key]))
            found.pieces[key].append(node)
        before = key
    if not all(_take_sizes_out(found, key) for key in found.pieces):
        return False
    for number in range(len(found.runs)):
        forward = [block for run, backward, block in order if run == number and not backward]
        back = [block for run, backward, block in order if run == number and backward]
        if forward != sorted(set(forward)) or back != sorted(set(back), reverse=True):
            return False
    return True


def _take_sizes_out(found: Standing, key: tuple[int, bool, int]) -> bool:
    """Remove the place of each node of `key`, the forward or backward of a block, that computes no tensor and that
    other blocks or other code read. Returns False where there is one in the forward or backward that is traced first
    after the missing blocks."""
    run, backward, block = key
    own = {*found.half(run, False, block), *found.half(run, True, block)}
    numbers = [node for node in found.pieces[key] if not list(tensors(node.meta.get("val")))]
    shared = {node for node in numbers if not own.issuperset(node.users)}
    for node in shared:
        del found.place[node]
    if shared:
        found.pieces[key] = [node for node in found.pieces[key] if node not in shared]
        for number, node in enumerate(found.pieces[key]):
            found.place[node] = BlockPlace(run, backward, block, number)
    return not shared or block != (TEMPLATE if backward else TEMPLATE + 1)


def _equal_in_run(found: Standing, run: int) -> bool:
    """Whether the blocks in the middle are equal, each to the next one."""
    forward = [found.half(run, False, block) for block in range(5)]
    backward = [found.half(run, True, block) for block in range(5)]
    return (
        _equal(found, forward[1], forward[2])
        and _equal(found, forward[2], forward[3])
        and _equal(found, backward[1], backward[2])
        and len(backward[2]) == len(backward[3])
        and all(_alike(found, one, later) for one, later in zip(backward[2], backward[3], strict=True))
    )


def _equal(found: Standing, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> bool:
    """Whether `other`, the nodes of a block, are `one`, those of the block before it, moved on by one block."""
    return len(one) == len(other) and all(
        _alike(found, node, later) and _reads_alike(found, node, later) for node, later in zip(one, other, strict=True)
    )


def _alike(found: Standing, node: fx.Node, later: fx.Node) -> bool:
    """Whether two nodes are equal but for what they read."""
    one, other = (node_kind(each, each.meta.get("val"), found.joint) for each in (node, later))
    return one == other and node.meta.keys() == later.meta.keys()


def _reads_alike(found: Standing, node: fx.Node, later: fx.Node) -> bool:
    """Whether what `later` reads, and the memory of its value, are those of `node` moved on by one block."""
    read = zip(sources_of(node), sources_of(later), strict=True)
    if not all(_moved(found, one, other) for one, other in read):
        return False
    for one, other in zip(tensors(node.meta.get("val")), tensors(later.meta.get("val")), strict=True):
        (maker, number), (later_maker, later_number) = found.made_by(one), found.made_by(other)
        if number != later_number or not _moved(found, maker, later_maker):
            return False
    return True


def _moved(found: Standing, one: fx.Node, other: fx.Node) -> bool:
    """Whether `other` takes the place of `one` in the next block; for nodes of other code, whether both are one
    node. In the forward of the first block places are counted from its end: where nothing before it is trained, its
    first operators save fewer values than those of the next block."""
    before, after = (found.place.get(node) or found.role.get(node) for node in (one, other))
    if before is None or after is None:
        return one is other
    if isinstance(before, BlockPlace) and before.block == 0 and not before.backward:
        first, second = (len(found.half(before.run, False, block)) for block in (0, 1))
        before = BlockPlace(before.run, before.backward, before.block, before.number + second - first)
    return before.of_block(before.block + 1) == after


def _read_nearby(found: Standing) -> bool:
    """Whether values are read, and lie in memory, only near what made them. An input that is a block's own is read
    in that block only, a block's value in that block and its neighbours. Other code reads values of the first and
    the last block only."""
    for node in found.joint.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        mine = found.place.get(node)
        makers = [found.made_by(tensor)[0] for tensor in tensors(node.meta.get("val"))]
        for source in (*sources_of(node), *makers):
            read, role = found.place.get(source), found.role.get(source)
            if role is not None and (mine is None or (mine.run, mine.block) != role[:2]):
                return False
            if read is None:
                continue
            if mine is not None and mine.run == read.run:
                if abs(mine.block - read.block) > 1:
                    return False
            elif read.block in (1, 2, 3):
                return False
    return True


def _gradients_alike(found: Standing) -> bool:
    """Whether each further block would return what the middle blocks do.

    Gradients of inputs that are a block's own must come from that block's backward, in each middle block from the
    node of the same number. All other results must come from the first or last block, or from other code."""
    results = graph_results(found.joint.graph)
    missing = {own for run in found.runs for number in run.missing for own in run.own[number].values()}
    given = found.module.graph.find_nodes(op="placeholder")
    made: dict[tuple[int, fx.Node], set[int | None]] = defaultdict(set)
    for number, result in enumerate(results):
        place = found.place.get(result) if isinstance(result, fx.Node) else None
        position = number - found.forward_outputs
        role = found.role.get(found.inputs[position]) if position >= 0 else None
        if position >= 0 and given[position] in missing and result is not None:
            return False
        if role is None:
            if place is not None and place.block in (1, 2, 3):
                return False
            continue
        run, block, template = role
        if place is None and result is not None:
            return False
        if place is not None and (place.run != run or not place.backward or place.block != block):
            return False
        if block in (1, 2, 3):
            made[run, template].add(None if place is None else place.number)
    return all(len(numbers) == 1 for numbers in made.values())

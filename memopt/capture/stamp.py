"""Traces a module with runs of equal blocks faster: only five blocks of each run are traced, and copied for the others.

The module is traced without the missing blocks and with all inputs, so that the trace finds out about inputs and
outputs what a trace of the whole module would. Where the five blocks that were traced, the standing ones, do not prove
what the missing ones are, the whole module is traced. Else the missing blocks are put into the traced graph, as copies
of a block that it has, the template.

The proof compares each block in the middle with the next one. In a joint graph, the forward and the backward of each
standing block are found by the operators that they were traced from; an operator graph has forwards only. Their nodes
must be equal. What two corresponding nodes read must be one value of other code, or two values at the same place: each
in the node's own block, in the block before or after it, or among the block's own inputs. Each further block would then
be traced alike, since it begins with equal values.

Names, module paths and stack traces are those that a trace of all blocks would give, and the values of each copy lie in
memory of their own. In each copy, an operator and its backward have one `seq_nr` (autograd's number of a node). One
thing may differ: if nothing reads the blocks' nodes of some name (`add`), later nodes of that name have smaller numbers
(`add_7`) than in such a trace.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from memopt.capture.blocks import TEMPLATE, BlockRun, find_runs, mark_operators, node_kind, traced_from, without_mark
from memopt.compat.fakes import fake_within
from memopt.compat.joint_trace import constants_as_attributes
from memopt.compat.tensors import storage_key
from memopt.compat.tracing import called_as
from passes.graphs.edit import LazyCode
from passes.graphs.node_facts import graph_results, is_tangent, sources_of, tensors

_Traced = TypeVar("_Traced")


def trace_blocks_once(
    trace: Callable[[fx.GraphModule], _Traced], module: fx.GraphModule, inputs: Sequence[Any], written: Collection[int]
) -> _Traced:
    """The result of `trace(module)`, found faster where the module has runs of equal blocks: `trace` gets a module with
    five blocks of each run, and the graph that it returns is completed with copies. `inputs` are the values of the
    module's placeholders, `written` the numbers of those that it writes to.

    The result is a dataclass with the traced graph, `module`, which is None where nothing is differentiated. It returns
    the forward's `forward_outputs` results first, then gradients, if it has a backward."""
    inlined = not [*module.parameters(), *module.buffers()]
    runs = find_runs(module, inputs, written) if inlined else ()
    if not runs:
        return trace(module)
    traced: Any = trace(_without_missing(module, runs))
    if traced.module is not None:
        standing = _standing_blocks(traced.module, traced.forward_outputs, module, runs)
        if standing is not None:
            marked = any(map(traced_from, module.graph.nodes))
            whole: _Traced = replace(traced, module=_Copier(standing, marked=marked).copied())
            return whole
    return trace(module)


def _without_missing(module: fx.GraphModule, runs: Sequence[BlockRun]) -> fx.GraphModule:
    """A copy of a module without the missing blocks: nodes that read the last of them read the template instead."""
    instead = {
        node: run.blocks[TEMPLATE][place]
        for run in runs
        for number in run.missing
        for place, node in enumerate(run.blocks[number])
    }
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node not in instead:
            copies[node] = graph.node_copy(node, lambda source: copies[instead.get(source, source)])
            copies[node].meta = dict(node.meta)
    mark_operators(graph)
    reduced = fx.GraphModule(module, graph, type(module).__name__)
    reduced.meta.update(module.meta)
    return constants_as_attributes(reduced)


_OF_OPERATORS = frozenset({"nn_module_stack", "source_fn_stack", "stack_trace"})
"""The entries of `meta` that a traced node takes over from the operator that it was traced from; those of nodes of the
backward have "fwd_" in front."""
_NAME = re.compile(r"(.*?_?)(\d+)$")


class _Copier:
    """Puts copies of a traced block into the joint graph of `of`, in the place of each block that was not traced. With
    `marked`, nodes keep the names of the operators that they were traced from (`traced_from`)."""

    def __init__(self, of: _Standing, *, marked: bool) -> None:
        self.of, self.marked, self.graph = of, marked, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        """Node of the joint graph → the node that takes its place in the new graph."""
        self.blocks: dict[_BlockPlace, fx.Node] = {}
        """The new graph's nodes in runs, by place. Here the number of a block is that among all blocks of the run."""
        self.grown: Counter[str] = Counter()
        """Name without its number → by how much larger that number is from here on than in the graph without the
        missing blocks."""
        self.constants: dict[str, Any] = {}
        self.storages: dict[tuple[_BlockPlace, int], torch.UntypedStorage] = {}
        """The storages that copies make, by the place of the node that makes them and the number of the tensor in its
        value."""
        self.origins: dict[tuple[fx.Node, str], int | None] = {}
        """By a node of the template and an entry of its `meta`: the position, in the block, of the operator from which
        the entry was taken over; None where there is none."""
        self.in_block = {
            node.name: number
            for run in of.runs
            for of_run in run.standing
            for number, node in enumerate(run.blocks[of_run])
        }
        self.own_sequences = [
            {node.meta.get("seq_nr") for node in of.half(run, False, TEMPLATE)} for run in range(len(of.runs))
        ]
        """For each run, the `seq_nr` of the template's forward."""
        self.sequences = 1 + max(node.meta.get("seq_nr", 0) for node in of.joint.graph.nodes)
        """More than any `seq_nr` of the joint graph; those of a copy are as much larger than those before."""
        self.stands_for = dict(zip(of.module.graph.find_nodes(op="placeholder"), of.inputs, strict=True))

    def copied(self) -> fx.GraphModule:
        """The joint graph of the whole model."""
        joint, runs = self.of.joint, range(len(self.of.runs))
        behind = {half[-1]: run for run in runs if (half := self.of.half(run, False, TEMPLATE))}
        before = {half[0]: run for run in runs if (half := self.of.half(run, True, TEMPLATE))}
        for node in joint.graph.nodes:
            if node.op == "output":
                self._finish(node)
                break
            if node in before:
                self._insert(before[node], backward=True)
            self._keep(node)
            if node in behind:
                self._insert(behind[node], backward=False)
        for node in self.graph.nodes if not self.marked else ():
            without_mark(node)
        for name, constant in self.constants.items():
            setattr(joint, name, constant)
        called_as(self.graph, joint.graph)
        module = LazyCode(joint, self.graph, type(joint).__name__)
        module.meta.update(joint.meta)
        return module

    def _keep(self, node: fx.Node) -> None:
        """Add a node of the joint graph to the new graph."""
        mine = self.of.place.get(node)

        def source(read: fx.Node) -> fx.Node:
            theirs = self.of.place.get(read)
            if mine is None or theirs is None or mine.run != theirs.run:
                return self.copies[read]
            run = self.of.runs[mine.run]
            block = run.standing[theirs.block]
            if {mine.block, theirs.block} == {TEMPLATE, TEMPLATE + 1}:  # between them are the missing blocks
                block = run.missing[0] if mine.block == TEMPLATE else run.missing[-1]
            return self.blocks[theirs.of_block(block)]

        copy = self._create(node, self._name(node.name), source)
        copy.meta = dict(node.meta)  # a copy, since `node.meta` is read again for the node's copies
        self.copies[node] = copy
        if mine is not None:
            number = self.of.runs[mine.run].standing[mine.block]
            if mine.block in (TEMPLATE, TEMPLATE + 1):  # it may be a view of a neighbour's value
                copy.meta["val"] = self._value(node.meta.get("val"), mine, number)
            self.blocks[mine.of_block(number)] = copy

    def _create(self, node: fx.Node, name: str, source: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Add a node like `node` under another name, which reads `source(read)` in place of each node `read`."""
        target = node.target
        if node.op == "get_attr" and target == node.name:
            target = name
            self.constants[name] = attrgetter(node.name)(self.of.joint)
        args, kwargs = fx.map_arg((node.args, node.kwargs), source)
        return self.graph.create_node(node.op, target, args, kwargs, name=name, type_expr=node.type)

    def _insert(self, run: int, *, backward: bool) -> None:
        """Add the forwards of all missing blocks of a run, in order, or their backwards, from the last to the first."""
        missing = self.of.runs[run].missing
        template, before = (self.of.half(run, backward, block) for block in (TEMPLATE, TEMPLATE - 1))
        steps = _name_steps(template, before) if backward else _name_steps(before, template)
        for turn, number in enumerate(reversed(missing) if backward else missing):
            # Without the missing blocks, the backward of the template has the numbers of the last of them.
            times = turn if backward else turn + 1
            for node in template:
                self._copy(node, number, self._name(node.name, steps, times))
        for base, step in steps.items():
            self.grown[base] += step * len(missing)

    def _copy(self, node: fx.Node, number: int, name: str) -> None:
        """Add a node of the template as one of block `number`."""
        mine = self.of.place[node]
        run = self.of.runs[mine.run]

        def source(read: fx.Node) -> fx.Node:
            theirs = self.of.place.get(read)
            if theirs is not None and theirs.run == mine.run:
                return self.blocks[theirs.of_block(number + theirs.block - TEMPLATE)]
            return self.copies[self._own_input(read, mine.run, number)]

        copy = self._create(node, name, source)
        copy.meta = self._meta(node, run, number)
        self.blocks[mine.of_block(number)] = copy

    def _own_input(self, node: fx.Node, run: int, number: int) -> fx.Node:
        """The input that block `number` reads in place of `node`, where that is an input of the template's own; else
        `node` itself."""
        role = self.of.role.get(node)
        if role is None or role.run != run:
            return node
        return self.stands_for[self.of.runs[run].own[number][role.template]]

    def _meta(self, node: fx.Node, run: BlockRun, number: int) -> dict[str, Any]:
        """The `meta` of the copy of a template's node. Entries that the node took over from an operator are taken from
        the operator in the same place of the copy's own block."""
        meta: dict[str, Any] = {}
        for key, entry in node.meta.items():
            if key == "val":
                meta[key] = self._value(entry, self.of.place[node], number)
            elif key == "seq_nr":
                own = entry in self.own_sequences[self.of.place[node].run]
                meta[key] = entry + (number - TEMPLATE) * self.sequences if own else entry
            elif key == "custom" and (name := traced_from(node)):
                meta[key] = {**entry, **run.blocks[number][self.in_block[name]].meta.get("custom", {})}
            elif (stored := key.removeprefix("fwd_")) in _OF_OPERATORS and entry:
                if (node, key) not in self.origins:
                    operators = enumerate(run.blocks[TEMPLATE])
                    origins = (place for place, operator in operators if operator.meta.get(stored) == entry)
                    self.origins[node, key] = next(origins, None)
                origin = self.origins[node, key]
                meta[key] = entry if origin is None else run.blocks[number][origin].meta.get(stored)
            elif key != "from_node":  # a chain of the nodes that this one was traced from
                meta[key] = entry
        return meta

    def _name(self, name: str, steps: Mapping[str, int] = MappingProxyType({}), times: int = 0) -> str:
        """The name that a trace of all blocks would give to a node, or to its copy `times` blocks later."""
        base, number = _parsed(name)
        number += self.grown[base] + times * steps.get(base, 0)
        return base.removesuffix("_") if base.endswith("_") and not number else f"{base}{number}"

    def _value(self, value: Any, mine: _BlockPlace, number: int) -> Any:
        """The value of the node at the place `mine` as block `number` has it: like tensors, in that block's memory."""
        if isinstance(value, torch.Tensor):
            storage = self._storage(value, mine, number)
            return value if storage is None else fake_within(storage, value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._value(element, mine, number) for element in value])
        return value

    def _storage(self, tensor: torch.Tensor, mine: _BlockPlace, number: int) -> torch.UntypedStorage | None:
        """The storage that block `number` has in place of that of `tensor`, a value of the node at the place `mine`;
        None where it is the same storage."""
        maker, at = self.of.made_by(tensor)
        place, run = self.of.place.get(maker), self.of.runs[mine.run]
        here = run.standing[mine.block]
        if place is None or place.run != mine.run:
            own = self._own_input(maker, mine.run, number)
            if number != here:
                return (tensor if own is maker else own.meta["val"]).untyped_storage()
            return None
        block = number + place.block - mine.block
        if number == here and block == run.standing[place.block]:
            return None
        if block in run.standing:
            real = self.of.half(mine.run, place.backward, run.standing.index(block))[place.number]
            return list(tensors(real.meta["val"]))[at].untyped_storage()
        key = place.of_block(block), at
        if key not in self.storages:
            nbytes = tensor.untyped_storage().nbytes()
            self.storages[key] = torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        return self.storages[key]

    def _finish(self, output: fx.Node) -> None:
        """Add the output, with the gradients of the missing blocks."""
        results: Any = output.args[0]
        given = {node: position for position, node in enumerate(self.of.inputs)}
        made = [self.copies[result] if isinstance(result, fx.Node) else result for result in results]
        for run in self.of.runs if len(results) > self.of.forward_outputs else ():
            for number in run.missing:
                for template, own in run.own[number].items():
                    result = results[self.of.forward_outputs + given[self.stands_for[template]]]
                    if result is not None:
                        place = self.of.place[result].of_block(number)
                        made[self.of.forward_outputs + given[self.stands_for[own]]] = self.blocks[place]
        self.graph.output(type(results)(made)).meta = output.meta


def _name_steps(first: Sequence[fx.Node], second: Sequence[fx.Node]) -> dict[str, int]:
    """By how much the numbers in node names grow from the forward, or the backward, of a block to that traced next."""
    steps: dict[str, int] = {}
    for one, other in zip(first, second, strict=True):
        (base, before), (other_base, after) = _parsed(one.name), _parsed(other.name)
        if base == other_base:
            steps.setdefault(base, after - before)
    return steps


def _parsed(name: str) -> tuple[str, int]:
    """A node's name without its number, and that number: 0 for the first node of the name, which has none."""
    match = _NAME.match(name)
    return (match[1], int(match[2])) if match else (f"{name}_", 0)


class _BlockPlace(NamedTuple):
    """Where a node of the joint graph belongs: to which run of equal blocks, forward or backward, which block of the
    run, and which node of the block."""

    run: int
    backward: bool
    block: int
    """The number of the block among the standing ones."""
    number: int
    """The number of the node in the forward, or the backward, of the block."""

    def of_block(self, block: int) -> _BlockPlace:
        """The same place in another block."""
        return _BlockPlace(self.run, self.backward, block, self.number)


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
class _Standing:
    """A joint graph that was traced with only some blocks of each run of equal blocks (the standing blocks), and which
    of its nodes belong to which block."""

    joint: fx.GraphModule
    forward_outputs: int
    module: fx.GraphModule
    """The module that the joint graph was traced from, with all blocks."""
    runs: tuple[BlockRun, ...]
    place: dict[fx.Node, _BlockPlace] = field(default_factory=dict)
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


def _standing_blocks(
    joint: fx.GraphModule, forward_outputs: int, module: fx.GraphModule, runs: tuple[BlockRun, ...]
) -> _Standing | None:
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
    found = _Standing(joint, forward_outputs, module, runs, inputs=inputs)
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


def _set_places(found: _Standing) -> bool:
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
            found.place[node] = _BlockPlace(*key, len(found.pieces[key]))
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


def _take_sizes_out(found: _Standing, key: tuple[int, bool, int]) -> bool:
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
            found.place[node] = _BlockPlace(run, backward, block, number)
    return not shared or block != (TEMPLATE if backward else TEMPLATE + 1)


def _equal_in_run(found: _Standing, run: int) -> bool:
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


def _equal(found: _Standing, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> bool:
    """Whether `other`, the nodes of a block, are `one`, those of the block before it, moved on by one block."""
    return len(one) == len(other) and all(
        _alike(found, node, later) and _reads_alike(found, node, later) for node, later in zip(one, other, strict=True)
    )


def _alike(found: _Standing, node: fx.Node, later: fx.Node) -> bool:
    """Whether two nodes are equal but for what they read."""
    one, other = (node_kind(each, each.meta.get("val"), found.joint) for each in (node, later))
    return one == other and node.meta.keys() == later.meta.keys()


def _reads_alike(found: _Standing, node: fx.Node, later: fx.Node) -> bool:
    """Whether what `later` reads, and the memory of its value, are those of `node` moved on by one block."""
    read = zip(sources_of(node), sources_of(later), strict=True)
    if not all(_moved(found, one, other) for one, other in read):
        return False
    for one, other in zip(tensors(node.meta.get("val")), tensors(later.meta.get("val")), strict=True):
        (maker, number), (later_maker, later_number) = found.made_by(one), found.made_by(other)
        if number != later_number or not _moved(found, maker, later_maker):
            return False
    return True


def _moved(found: _Standing, one: fx.Node, other: fx.Node) -> bool:
    """Whether `other` takes the place of `one` in the next block; for nodes of other code, whether both are one
    node. In the forward of the first block places are counted from its end: where nothing before it is trained, its
    first operators save fewer values than those of the next block."""
    before, after = (found.place.get(node) or found.role.get(node) for node in (one, other))
    if before is None or after is None:
        return one is other
    if isinstance(before, _BlockPlace) and before.block == 0 and not before.backward:
        first, second = (len(found.half(before.run, False, block)) for block in (0, 1))
        before = _BlockPlace(before.run, before.backward, before.block, before.number + second - first)
    return before.of_block(before.block + 1) == after


def _read_nearby(found: _Standing) -> bool:
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


def _gradients_alike(found: _Standing) -> bool:
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

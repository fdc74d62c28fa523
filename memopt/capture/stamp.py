"""Traces a module with runs of equal blocks faster: only five blocks of each run are traced, and copied for the others.

The module is traced without the missing blocks and with all inputs, so that the trace finds out about inputs and
outputs what a trace of the whole module would. Where the five blocks do not prove what the missing ones are, the whole
module is traced. Else the missing blocks are put into the traced graph, as copies of a block that it has, the template.

Names, module paths and stack traces are those that a trace of all blocks would give, and the values of each copy lie in
memory of their own. In each copy, an operator and its backward have one `seq_nr` (autograd's number of a node). One
thing may differ: if nothing reads the blocks' nodes of some name (`add`), later nodes of that name have smaller numbers
(`add_7`) than in such a trace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import fx

from memopt.capture.blocks import TEMPLATE, BlockRun, find_runs, mark_operators, traced_from, without_mark
from memopt.capture.standing import BlockPlace, Standing, standing_blocks
from memopt.compat.fakes import fake_within
from memopt.compat.joint_trace import constants_as_attributes
from memopt.compat.tracing import called_as
from passes.graphs.edit import LazyCode
from passes.graphs.node_facts import tensors

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
        standing = standing_blocks(traced.module, traced.forward_outputs, module, runs)
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

    def __init__(self, of: Standing, *, marked: bool) -> None:
        self.of, self.marked, self.graph = of, marked, fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        """Node of the joint graph → the node that takes its place in the new graph."""
        self.blocks: dict[BlockPlace, fx.Node] = {}
        """The new graph's nodes in runs, by place. Here the number of a block is that among all blocks of the run."""
        self.grown: Counter[str] = Counter()
        """Name without its number → by how much larger that number is from here on than in the graph without the
        missing blocks."""
        self.constants: dict[str, Any] = {}
        self.storages: dict[tuple[BlockPlace, int], torch.UntypedStorage] = {}
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

    def _value(self, value: Any, mine: BlockPlace, number: int) -> Any:
        """The value of the node at the place `mine` as block `number` has it: like tensors, in that block's memory."""
        if isinstance(value, torch.Tensor):
            storage = self._storage(value, mine, number)
            return value if storage is None else fake_within(storage, value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._value(element, mine, number) for element in value])
        return value

    def _storage(self, tensor: torch.Tensor, mine: BlockPlace, number: int) -> torch.UntypedStorage | None:
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

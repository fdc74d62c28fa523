"""Puts the missing blocks of runs (`memopt.capture.blocks`) into a graph that was traced without them, as copies of a
block that it has, the template.

Names, `seq_nr` (autograd's numbers of nodes), module paths and stack traces are those that a trace of all blocks would
give, and the values of each copy lie in memory of their own. One thing may differ: if nothing reads the blocks' nodes
of some name (`add`), later nodes of that name have smaller numbers (`add_7`) than in such a trace.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from memopt.capture.blocks import TEMPLATE, BlockRun
from memopt.capture.marks import traced_from, without_mark
from memopt.capture.standing import BlockPlace, Standing
from memopt.compat.fakes import fake_within, new_storage
from memopt.compat.tracing import called_as
from passes.graphs.edit import LazyCode
from passes.graphs.node_facts import tensors

_OF_OPERATORS = frozenset({"nn_module_stack", "source_fn_stack", "stack_trace"})
"""The entries of `meta` that a traced node takes over from the operator that it was traced from; those of nodes of the
backward have "fwd_" in front."""
_NAME = re.compile(r"(.*?_?)(\d+)$")


def with_copies(standing: Standing, *, marked: bool) -> fx.GraphModule:
    """The joint graph of `standing`, with a copy of a traced block in the place of each block that was not traced. With
    `marked`, nodes keep the names of the operators that they were traced from, which `traced_from` returns; else these
    marks are removed."""
    return _Copier(standing, marked).copied()


@dataclass
class _Steps:
    """By how much the numbers in node names, and `seq_nr`, grow from a block to the next one traced."""

    of_name: dict[str, int]
    of_sequence: int

    @classmethod
    def between(cls, first: list[fx.Node], second: list[fx.Node]) -> _Steps:
        """The steps between the forwards, or the backwards, of two blocks, in the order in which they were traced."""
        of_name: dict[str, int] = {}
        for one, other in zip(first, second, strict=True):
            (base, before), (other_base, after) = _parsed(one.name), _parsed(other.name)
            if base == other_base:
                of_name.setdefault(base, after - before)
        growth = (b.meta["seq_nr"] - a.meta["seq_nr"] for a, b in zip(first, second, strict=True) if "seq_nr" in a.meta)
        return cls(of_name, next(growth, 0))


@dataclass
class _Copier:
    """The state of `with_copies`."""

    of: Standing
    marked: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Node of the joint graph → the node that takes its place in the new graph."""
    blocks: dict[BlockPlace, fx.Node] = field(default_factory=dict)
    """The new graph's nodes in runs, by place. Here the number of a block is that among all blocks of the run."""
    grown: Counter[str] = field(default_factory=Counter)
    """Name without its number → by how much larger that number is from here on than in the graph without the missing
    blocks."""
    constants: dict[str, Any] = field(default_factory=dict)
    storages: dict[tuple[BlockPlace, int], torch.UntypedStorage] = field(default_factory=dict)
    """The storages that copies make, by the place of the node that makes them and the number of the tensor in its
    value."""

    def __post_init__(self) -> None:
        calls = [node for node in self.of.module.graph.nodes if node.op != "output"]
        self.order = {node.name: number for number, node in enumerate(calls)}
        self.in_block = {
            node.name: number
            for run in self.of.runs
            for of_run in run.standing
            for number, node in enumerate(run.blocks[of_run])
        }
        self.steps: dict[tuple[int, bool], _Steps] = {}
        self.sequences: list[tuple[int, int]] = []
        """For each run, the first `seq_nr` in the forward of the block before the template, and of the one after it."""
        for number in range(len(self.of.runs)):
            before, after = (self.of.half(number, False, block) for block in (TEMPLATE - 1, TEMPLATE + 1))
            self.sequences.append((_first_sequence(before), _first_sequence(after)))
            forward = partial(self.of.half, number, False)
            self.steps[number, False] = _Steps.between(forward(1), forward(2))
            backward = partial(self.of.half, number, True)
            self.steps[number, True] = _Steps.between(backward(2), backward(1))
        self.stands_for = dict(zip(self.of.module.graph.find_nodes(op="placeholder"), self.of.inputs, strict=True))
        self.fakes: dict[tuple[int, int], torch.Tensor] = {}
        self.origins: dict[tuple[fx.Node, str], int | None] = {}
        """By a node of the template and an entry of its `meta`: the position, in the block, of the operator from which
        the entry was taken over; None where there is none."""

    def copied(self) -> fx.GraphModule:
        """The joint graph of the whole model: that of the blocks which were traced, with a copy of a traced block's
        operators for each one that was not."""
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

        name = self._name(node.name)
        target = node.target
        if node.op == "get_attr" and node.target == node.name:
            target = name
            self.constants[name] = attrgetter(node.name)(self.of.joint)
        copy = self._create(node, name, target, source)
        copy.meta = dict(node.meta)  # a copy, since `node.meta` is read again for the node's copies
        if "seq_nr" in copy.meta:
            copy.meta["seq_nr"] = self._sequence(node)
        self.copies[node] = copy
        if mine is not None:
            number = self.of.runs[mine.run].standing[mine.block]
            if mine.block in (TEMPLATE, TEMPLATE + 1):  # it may be a view of a neighbour's value
                copy.meta["val"] = self._value(node.meta.get("val"), mine, number)
            self.blocks[mine.of_block(number)] = copy

    def _create(self, node: fx.Node, name: str, target: Any, source: Callable[[fx.Node], fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), source)
        return self.graph.create_node(node.op, target, args, kwargs, name=name, type_expr=node.type)

    def _insert(self, run: int, *, backward: bool) -> None:
        """Add the forwards of all missing blocks of a run, in order, or their backwards, from the last to the first."""
        missing = self.of.runs[run].missing
        steps = self.steps[run, backward]
        template = self.of.half(run, backward, TEMPLATE)
        for turn, number in enumerate(reversed(missing) if backward else missing):
            # Without the missing blocks, the backward of the template has the numbers of the last of them.
            times = turn if backward else turn + 1
            for node in template:
                self._copy(node, number, self._name(node.name, steps.of_name, times))
        for base, step in steps.of_name.items():
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

        target = node.target
        if node.op == "get_attr" and target == node.name:
            target = name
            self.constants[name] = attrgetter(node.name)(self.of.joint)
        copy = self._create(node, name, target, source)
        copy.meta = self._meta(node, run, number)
        self.blocks[mine.of_block(number)] = copy

    def _own_input(self, node: fx.Node, run: int, number: int) -> fx.Node:
        """The input that block `number` reads in place of `node`, where that is an input of the template's own; else
        `node` itself."""
        role = self.of.role.get(node)
        return node if role is None or role[0] != run else self.stands_for[self.of.runs[run].own[number][role[2]]]

    def _meta(self, node: fx.Node, run: BlockRun, number: int) -> dict[str, Any]:
        """The `meta` of the copy of a template's node. Entries that the node took over from an operator are taken from
        the operator in the same place of the copy's own block."""
        meta: dict[str, Any] = {}
        for key, entry in node.meta.items():
            if key == "val":
                meta[key] = self._value(entry, self.of.place[node], number)
            elif key == "seq_nr":
                meta[key] = self._sequence(node, number)
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

    def _sequence(self, node: fx.Node, number: int = TEMPLATE) -> int:
        """The `seq_nr` that a trace of all blocks would give to a node, or to its copy in block `number`."""
        found = sequence = int(node.meta["seq_nr"])
        backward, mine = node.meta.get("partitioner_tag") == "is_backward", self.of.place.get(node)
        order = None if backward else self.order.get(traced_from(node))
        for at, run in enumerate(self.of.runs):
            step, (first, after) = self.steps[at, False].of_sequence, self.sequences[at]
            # Of a forward call that has no backward, the number is that of the next one that has.
            later = sequence >= after if order is None else order >= self.order[run.blocks[run.missing.stop][0].name]
            if later:
                found += step * len(run.missing)
            elif mine is not None and mine.run == at and (sequence >= first or not backward):
                found += step * (number - TEMPLATE)
        return found

    def _value(self, value: Any, mine: BlockPlace, number: int) -> Any:
        """The value of the node at the place `mine` as block `number` has it: like tensors, in that block's memory."""
        if isinstance(value, torch.Tensor):
            key = id(value), number
            if key not in self.fakes:
                storage = self._storage(value, mine, number)
                self.fakes[key] = value if storage is None else fake_within(storage, value)
            return self.fakes[key]
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
            self.storages[key] = new_storage(tensor.untyped_storage().nbytes())
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


def _first_sequence(nodes: Sequence[fx.Node]) -> int:
    """The smallest `seq_nr` among the nodes; a number larger than any where there is none."""
    return min((node.meta["seq_nr"] for node in nodes if "seq_nr" in node.meta), default=sys.maxsize)


def _parsed(name: str) -> tuple[str, int]:
    """A node's name without its number, and that number: 0 for the first node of the name, which has none."""
    match = _NAME.match(name)
    return (match[1], int(match[2])) if match else (f"{name}_", 0)

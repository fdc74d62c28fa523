"""From a joint graph to a `RematProblem`: its storages, seconds and workspaces, and which ops may be recomputed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import fx

from memopt.device.device import Device
from memopt.device.devices import device_of
from memopt.device.storages import Storages, find_storages, is_mutation, storage_bytes
from memopt.price.node_prices import is_attention_core, number_blocks, split_halves
from memopt.price.priced_graph import (
    ALONE,
    GraphUse,
    NodePrice,
    PassedOn,
    PlacedParameterStep,
    PricedGraph,
    PricedParameterStep,
    Reduction,
    numbered_calls,
    reductions_after,
    steps_after,
)
from memopt.solver import Op, RematProblem, Storage
from passes import is_pure, is_random
from passes.graphs.node_facts import binds_new_symbols, graph_results, is_tangent, module_path

# Operators that may be recomputed although the step writes to the running statistics that they read, each with the
# position of its argument `training`: if it is True, the old statistics are ignored, and the new ones used only once.
_TRAINING_ARGUMENT = {
    torch.ops.aten._native_batch_norm_legit_functional.default: 5,
}

# Draws of seeds are saved: they are a few bytes, and random values are recomputed from them.
_DRAWS_SEEDS = "prims.inductor_seeds"

_KEEPS_ALL = PassedOn(frozenset())
PASSED_OUTPUTS, PASSED_GRADIENTS, GIVEN = "passed_outputs", "passed_gradients", "given_by_other_regions"
"""The names of ops of one region among several that stand for other code. Outputs that the region passes on live until
the first, gradients until the second; the third makes the inputs that are outputs of earlier regions."""
RETURN_OUTPUTS = "return_outputs"
"""The op at the end of the forward that keeps the results alive which the caller drops when the backward begins."""


def price(
    joint: fx.GraphModule, forward_outputs: int, price_of: Callable[[fx.Node], NodePrice], use: GraphUse = ALONE
) -> PricedGraph:
    """A joint graph in canonical form (`JointGraph.of`) as a problem for the solver: its operators with seconds and
    workspace, its storages with bytes.

    Args:
        joint: the graph, with fake tensors in `meta["val"]`.
        forward_outputs: how many of its results are the forward's; the others are gradients.
        price_of: the seconds and workspace of a node.
        use: what the step does with the graph's inputs and results.
    """
    return _Pricer(joint, forward_outputs, price_of, use).run()


@dataclass
class _Pricer:
    """The state of one call of `price`, whose arguments are its first fields."""

    joint: fx.GraphModule
    forward_outputs: int
    price_of: Callable[[fx.Node], NodePrice]
    use: GraphUse
    reduced: dict[fx.Node, list[tuple[Reduction, frozenset[int]]]] = field(default_factory=dict)
    placed: dict[fx.Node, list[PlacedParameterStep]] = field(default_factory=dict)
    stepped_by: set[int] = field(default_factory=set)
    """Storages of gradients that a parameter's step reads last and frees."""
    kept: set[int] = field(default_factory=set)
    """Storages that live to the end of the step."""
    lent: set[int] = field(default_factory=set)
    """Storages of outputs that are passed on."""
    forward_only: dict[int, int] = field(default_factory=dict)
    """Position of an output that is held in the call's forward only → the number of its storage in the graph."""
    given_on: set[int] = field(default_factory=set)
    """Storages of gradients that live to the end of the backward."""
    tangents: set[int] = field(default_factory=set)
    """Storages of the outputs' gradients of one of several regions, which live to the end of its backward."""
    listed: list[Storage] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)
    """Number of a storage in the graph → its position in `listed`."""
    ops: list[Op] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    priced_steps: dict[int, PricedParameterStep] = field(default_factory=dict)
    op_of: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.joint.graph
        self.storages: Storages = find_storages(self.graph, self.use.fused, self.use.reuses)
        self.resident = {
            index
            for index, block in enumerate(self.storages.blocks)
            if block.maker.op in ("placeholder", "get_attr") and not is_tangent(block.maker)
        }
        self.mutated = {
            index
            for node in self.graph.nodes
            if node.op == "call_function" and is_mutation(node)
            for index in self.storages.of[node]
        }
        given = [node for node in self.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        self.mutated.update(
            index for number in self.use.overwritten for index in self.storages.of.get(given[number], ())
        )
        self.results = graph_results(self.graph)

    def run(self) -> PricedGraph:
        forward, backward = split_halves(self.graph, self.use.fused)
        self.placed = steps_after(self.graph, self.storages, self.use.steps, backward)
        self.stepped_by = {step.storage for steps in self.placed.values() for step in steps}
        self.reduced = reductions_after(self.use.reductions, self.results, self.storages, backward)
        self.kept = self.kept_results()
        outputs, passed_on = range(self.forward_outputs), self.use.passed_on or _KEEPS_ALL
        self.lent = self.passed_on_among(outputs)
        held = self.passed_on_among(set(outputs).difference(passed_on.forward_only))
        self.forward_only = self.storages_at(passed_on.forward_only, self.lent - held)
        self.given_on = self.passed_on_among(range(self.forward_outputs, len(self.results)))
        paths = {node: module_path(node) for node in (*forward, *backward)}
        blocks = number_blocks([paths[node] for node in forward])
        given = self.add_given(passed_on.given)
        self.add_hosted()
        for node in forward:
            if is_random(node):
                self.add_generator_state(node)
            self.add(node, paths[node], blocks.get(paths[node], -1), self.recomputable(node))
        self.add_return()
        forward_ops = len(self.ops)
        self.add_tangents()
        self.add_end(PASSED_OUTPUTS, held)
        for node in backward:
            self.add(node, paths[node], -1, recomputable=False)
            for step in self.placed.get(node, ()):
                self.add_step(step)
            for reduction, gradients in self.reduced.get(node, ()):
                self.add_reduction(reduction, gradients)
        self.add_hand_over()
        if self.use.passed_on is not None:
            self.add_end(PASSED_GRADIENTS, self.given_on | self.tangents)
        problem = RematProblem(tuple(self.ops), tuple(self.listed), forward_ops)
        steps = MappingProxyType(self.priced_steps)
        read = {at: self.number[index] for at, index in self.forward_only.items() if index in self.number}
        columns = tuple(self.nodes), tuple(self.modules), tuple(self.values)
        return PricedGraph(problem, *columns, steps, read, given, tuple(sorted(self.use.hosted)))

    def storages_at(self, positions: Collection[int], among: set[int]) -> dict[int, int]:
        """Position → number of a storage, for the results at these positions that lie in a storage of `among`."""
        nodes = ((position, self.results[position]) for position in positions)
        found = ((at, self.storages.of.get(node, ())) for at, node in nodes if isinstance(node, fx.Node))
        return {at: index for at, indices in found for index in indices if index in among}

    def add_given(self, numbers: Collection[int]) -> dict[int, int]:
        """Append the op that stands for the regions whose outputs are the inputs of these numbers, if there are any.

        It makes a storage without bytes for each such input, which the ops that read the input read: so a schedule
        shows where the input is needed. Returns number of an input → position of that storage in `listed`.
        """
        nodes = [node for node in self.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        indices = ((number, index) for number in numbers for index in self.storages.of.get(nodes[number], ()))
        linked = {number: index for number, index in indices if index not in self.mutated}
        for number, index in linked.items():
            self.number[index] = len(self.listed)
            self.listed.append(Storage(f"given_{number}", 0, movable=False))
            self.values.append("")
            self.resident.discard(index)
        if linked:
            made = tuple(self.number[index] for index in linked.values())
            self.append(Op(GIVEN, 0.0, (), made, recomputable=False))
        return {number: self.number[index] for number, index in linked.items()}

    def add_hosted(self) -> None:
        """Append, for each input that lies on the host, an op that makes its storage; then an op named "begin", at
        which the inputs that are read first are copied to the device."""
        nodes = [node for node in self.graph.find_nodes(op="placeholder") if not is_tangent(node)]
        for number in sorted(self.use.hosted):
            (index,) = self.storages.of[nodes[number]]
            self.resident.discard(index)
            self.number[index] = len(self.listed)
            name, nbytes = nodes[number].name, self.rounded(self.storages.bytes[index])
            self.listed.append(Storage(name, nbytes, home=True))
            self.values.append(name)
            self.append(Op(f"{name}_on_host", 0.0, (), (self.number[index],), recomputable=False))
        if self.use.hosted:
            self.append(Op("begin", 0.0, (), (), recomputable=False))

    def passed_on_among(self, positions: Collection[int]) -> set[int]:
        """The storages of those results at these positions that are passed on to other code, without those that live to
        the end of the step."""
        passed_on = (self.use.passed_on or _KEEPS_ALL).results.intersection(positions)
        nodes = [self.results[position] for position in passed_on]
        found = {index for node in nodes if isinstance(node, fx.Node) for index in self.storages.of.get(node, ())}
        return found - self.kept - self.resident

    def add_end(self, name: str, storages: set[int]) -> None:
        """Append an op that reads these storages, so that they live until then; no op where none is listed."""
        if reads := tuple(self.number[index] for index in sorted(storages) if index in self.number):
            self.append(Op(name, 0.0, reads, (), recomputable=False))

    def kept_results(self) -> set[int]:
        """Storages of the results that are alive to the end of the step."""
        gone = {
            *self.use.accumulated,
            *self.use.released,
            *(self.use.passed_on or _KEEPS_ALL).results,
            *(step.position for steps in self.placed.values() for step in steps),
            *(at for placed in self.reduced.values() for reduction, _ in placed for at in reduction.positions),
        }
        return {
            index
            for position, node in enumerate(self.results)
            if isinstance(node, fx.Node) and position not in gone
            for index in self.storages.of.get(node, ())
        }

    def add_step(self, step: PlacedParameterStep) -> None:
        """Append the optimizer's step of one parameter."""
        after = frozenset(self.op_of[node] for node in step.before if node in self.op_of)
        self.priced_steps[len(self.ops)] = PricedParameterStep(step.number, after)
        name = f"step_of_input_{step.number}"
        self.append(
            Op(name, 0.0, (self.number[step.storage],), (), self.rounded(step.workspace_bytes), recomputable=False)
        )

    def add_reduction(self, reduction: Reduction, gradients: frozenset[int]) -> None:
        """Append the op in which a group's gradients are reduced; of the result each card keeps its share."""
        reads = tuple(sorted({self.number[index] for index in gradients if index in self.number}))
        made: tuple[int, ...] = ()
        if reduction.made_bytes:
            made = (len(self.listed),)
            self.listed.append(Storage(reduction.name, self.rounded(reduction.made_bytes), kept=True, movable=False))
            self.values.append("")
        workspace = self.rounded(reduction.buffer_bytes)
        self.append(Op(reduction.name, 0.0, reads, made, workspace_bytes=workspace, recomputable=False), "", "")

    def add(self, node: fx.Node, path: str, block: int, recomputable: bool) -> None:
        """Append the op of a node, which lies in the module `path` and in the repeated block number `block`, or -1."""
        price = self.price_of(node)
        self.op_of[node] = len(self.ops)
        reads = [self.number[index] for index in self.storages.read_by(node) if index not in self.resident]
        if recomputable and is_random(node):
            reads.append(len(self.listed) - 1)
        made = self.storages.made_by(node)
        surplus = max(0, price.output_bytes - sum(self.storages.bytes[index] for index in made))
        makes = tuple(self.list_storage(index, surplus if index == made[0] else 0) for index in made)
        # To recompute a random op, the generator's present state is saved meanwhile.
        set_aside = _device(node).generator_state_bytes if recomputable and is_random(node) else 0
        self.append(
            Op(
                name=node.name,
                seconds=price.seconds,
                reads=tuple(dict.fromkeys(reads)),
                makes=makes,
                workspace_bytes=self.rounded(price.workspace_bytes) + self.rounded(set_aside),
                recomputable=recomputable,
                block=block,
                attention=is_attention_core(node, path),
                calls=numbered_calls(price.calls, self.storages.of.get(node, ()), made),
            ),
            node.name,
            path,
        )

    def append(self, op: Op, node: str = "", path: str = "") -> None:
        """Append an op, the name of its node and its module path; both are "" for an op that stands for no node."""
        self.ops.append(op)
        self.nodes.append(node)
        self.modules.append(path)

    def list_storage(self, index: int, surplus_bytes: int = 0) -> int:
        """List a storage of the graph, with `surplus_bytes` beyond what its shape says; return its position in
        `listed`."""
        maker, own_bytes = self.storages.blocks[index].maker, self.storages.bytes[index]
        self.number[index] = len(self.listed)
        written = index in self.mutated or index in self.storages.written_over or index in self.stepped_by
        lent = index in self.lent or index in self.given_on  # a copy on the host frees nothing: eager code holds them
        fixed = written or lent or own_bytes < self.use.least_moved_bytes
        value = "" if fixed else self.value_of(index)
        nbytes = self.rounded(own_bytes + surplus_bytes)
        self.listed.append(Storage(maker.name, nbytes, kept=index in self.kept, movable=bool(value)))
        self.values.append(value)
        return self.number[index]

    def value_of(self, index: int) -> str:
        """The name of the node whose tensor fills a storage: its maker or an element of its results; "" if none."""
        maker = self.storages.blocks[index].maker
        if is_tangent(maker):
            return ""
        nodes = [maker] if isinstance(maker.meta.get("val"), torch.Tensor) else list(maker.users)
        return next((node.name for node in nodes if self.storages.of.get(node) == (index,)), "")

    def add_generator_state(self, node: fx.Node) -> None:
        """Append the op that saves the generator's state for a random node that may be recomputed. The schedule
        decides how long the state is kept."""
        if not self.recomputable(node):
            return
        state_bytes = self.rounded(_device(node).generator_state_bytes)
        self.listed.append(Storage(f"{node.name}_state", state_bytes, movable=False))
        self.values.append("")
        self.append(Op(f"{node.name}_state", 0.0, (), (len(self.listed) - 1,), recomputable=False))

    def add_return(self) -> None:
        """Append the op that holds the released results (`GraphUse.released`) until the end of the forward, if any."""
        nodes = (self.results[position] for position in self.use.released)
        held = {index for node in nodes if isinstance(node, fx.Node) for index in self.storages.of.get(node, ())}
        if reads := tuple(self.number[index] for index in sorted(held - self.resident - self.kept)):
            self.append(Op(RETURN_OUTPUTS, 0.0, reads, (), recomputable=False))

    def add_tangents(self) -> None:
        """Append the ops that make the gradients of the outputs, which autograd holds until the end of the backward."""
        for node in self.graph.nodes:
            if is_tangent(node):
                (self.kept if self.use.passed_on is None else self.tangents).update(self.storages.of[node])
                makes = tuple(self.list_storage(index) for index in self.storages.of[node])
                self.append(Op(node.name, 0.0, (), makes, recomputable=False))

    def add_hand_over(self) -> None:
        """Append the op in which autograd sets `.grad`, at the end of the backward.

        A gradient with the parameter's strides becomes `.grad` itself. Others are copied one after the other, and the
        copy of an expanded gradient is larger than the original. Where parameters are stepped in the backward, those
        that could not be stepped earlier are stepped here.
        """
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        gradients = dict(enumerate(self.results[self.forward_outputs :]))
        receivers = {number: number for number in gradients} if self.use.receivers is None else self.use.receivers
        pairs = [(inputs[number], gradients[position]) for position, number in receivers.items()]
        copied = [
            (self.rounded(self.storages.bytes[index]), self.rounded(storage_bytes(given.meta["val"])))
            for given, gradient in pairs
            if isinstance(gradient, fx.Node) and _is_tensor(gradient) and _strides(gradient) != _strides(given)
            for index in self.storages.of[gradient]
            if index in self.kept
        ]
        growth = sum(max(0, copy - original) for original, copy in copied)
        largest = max((original for original, _ in copied), default=0)
        done = {step.number for step in self.priced_steps.values()}
        given = {number for position, number in receivers.items() if gradients[position] is not None}
        workspaces = (nbytes for number, nbytes in self.use.steps.workspaces.items() if number in given - done)
        workspace = growth + largest + self.rounded(max(workspaces, default=0))
        self.append(Op("hand_over_gradients", 0.0, (), (), workspace_bytes=workspace, recomputable=False))

    def rounded(self, nbytes: int) -> int:
        """Bytes of the blocks that the allocator gives for `nbytes`."""
        return -(-nbytes // self.use.block_bytes) * self.use.block_bytes

    def recomputable(self, node: fx.Node) -> bool:
        """Whether a forward node may be recomputed: a second evaluation gives the same values and changes nothing else,
        and the node makes neither a decision, a seed nor an output that is passed on."""
        if not (is_pure(node) or is_random(node)) or not self.storages.of.get(node) or binds_new_symbols(node):
            return False
        if node in self.use.decisions:
            return False
        if str(node.target).startswith(_DRAWS_SEEDS) or not self.lent.isdisjoint(self.storages.made_by(node)):
            return False
        reads_mutated = not self.mutated.isdisjoint(self.storages.read_by(node))
        position = _TRAINING_ARGUMENT.get(node.target)  # type: ignore[call-overload]
        trains = position is not None and node.args[position] is True
        return trains or not reads_mutated


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _strides(node: fx.Node) -> tuple[int, ...]:
    return node.meta["val"].stride()


def _device(node: fx.Node) -> Device:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return device_of(first.device)

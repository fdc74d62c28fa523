"""From a joint graph to a `RematProblem`: storages, seconds, workspace, and what must not be evaluated twice."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from memopt.compat.operators import OpOverload, schema_of
from memopt.device.storages import Storages, find_storages, is_view, storage_bytes
from memopt.price.blocks import is_attention_core, number_blocks
from memopt.price.stepping import PlacedStep, Steps, place_steps
from memopt.solver import Op, RematProblem, Storage
from passes import FoundReuse, is_pure, is_random
from passes.graphs.module_path import module_path
from passes.graphs.node_facts import backward_nodes, binds_new_symbols, is_tangent
from passes.ops.offload_ops import TRANSFERS

GENERATOR_STATE_BYTES = {"cpu": 5056, "cuda": 16}

# In training these ignore the running statistics that they read, and return new ones that only the first time uses.
_TRAINING_ARGUMENT = {
    torch.ops.aten._native_batch_norm_legit_functional.default: 5,
}

# A draw of seeds is a few bytes, and what they seed is drawn from them as often as it may be.
_DRAWS_SEEDS = "prims.inductor_seeds"


@dataclass(frozen=True)
class NodePrice:
    """What one evaluation of a node costs: seconds, and the bytes of its kernel's own temporaries."""

    seconds: float
    workspace_bytes: int
    output_bytes: int = 0
    """What its results hold as measured, where that is more than their shapes say (a loss reduced in place keeps the
    memory of its elements); else 0."""


NO_STEPS = Steps()


@dataclass(frozen=True)
class PricedStep:
    """A parameter's step within the backward: an op of the account only."""

    number: int
    """Of the input."""
    after: frozenset[int]
    """The ops that read the parameter or its gradient: it comes behind all their evaluations."""


@dataclass(frozen=True)
class PricedGraph:
    """A joint graph as numbers. `nodes[i]` names the node that op `i` evaluates; "" for an op of the account only."""

    problem: RematProblem
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    """The module path of each op, "" where none is known."""
    values: tuple[str, ...] = ()
    """The node whose tensor each storage is, "" for what cannot be moved elsewhere (`Storage.movable`)."""
    steps: dict[int, PricedStep] = field(default_factory=dict)
    """By op."""


def price(
    joint: fx.GraphModule,
    forward_outputs: int,
    price_of: Callable[[fx.Node], NodePrice],
    accumulated: Collection[int] = (),
    fused: frozenset[fx.Node] = frozenset(),
    least_moved_bytes: int = 0,
    block_bytes: int = 1,
    steps: Steps = NO_STEPS,
    reuses: Collection[FoundReuse] = (),
) -> PricedGraph:
    """Price a canonical joint graph; the values of `fused` nodes are never held, and no schedule names these.

    `forward_outputs` of its results are the forward's. `accumulated` are the positions, among all results, of the
    gradients that are added to an existing `.grad` as soon as they are there; all other results are kept to the end.
    Values of fewer than `least_moved_bytes` cannot go to the host. Memory is handed out in multiples of `block_bytes`.
    Of `steps`, those that can be are taken as soon as the parameter and its gradient are read no more, the others at
    the end, one after the other. `reuses` are the calls of the backward whose results take an operand's memory.
    """
    return _Pricer(
        joint, forward_outputs, price_of, accumulated, fused, least_moved_bytes, block_bytes, steps, reuses
    ).run()


class _Pricer:
    def __init__(
        self,
        joint: fx.GraphModule,
        forward_outputs: int,
        price_of: Callable[[fx.Node], NodePrice],
        accumulated: Collection[int],
        fused: frozenset[fx.Node],
        least_moved_bytes: int,
        block_bytes: int,
        steps: Steps,
        reuses: Collection[FoundReuse],
    ) -> None:
        self.graph = joint.graph
        self.least_moved_bytes = least_moved_bytes
        self.block_bytes = block_bytes
        self.price_of = price_of
        self.fused = fused
        self.storages: Storages = find_storages(joint.graph, fused, reuses)
        self.resident = {
            index
            for index, info in enumerate(self.storages.infos)
            if info.maker.op in ("placeholder", "get_attr") and not is_tangent(info.maker)
        }
        self.mutated = {
            index
            for node in joint.graph.nodes
            if node.op == "call_function" and is_mutation(node)
            for index in self.storages.of[node]
        }
        results = joint.graph.output_node().args[0]
        assert isinstance(results, (tuple, list))
        self.results = results
        self.steps = steps
        self.placed: dict[fx.Node, list[PlacedStep]] = {}
        self.stepped_by: set[int] = set()
        self.kept: set[int] = set()
        self.accumulated = accumulated
        self.forward_outputs = forward_outputs
        self.listed: list[Storage] = []
        self.number: dict[int, int] = {}
        self.ops: list[Op] = []
        self.nodes: list[str] = []
        self.modules: list[str] = []
        self.values: list[str] = []
        self.priced_steps: dict[int, PricedStep] = {}
        self.op_of: dict[fx.Node, int] = {}

    def run(self) -> PricedGraph:
        forward, backward = split_halves(self.graph, self.fused)
        self.placed = place_steps(self.graph, self.storages, self.steps, backward)
        self.stepped_by = {step.storage for steps in self.placed.values() for step in steps}
        self.kept = self.kept_results()
        paths = {node: module_path(node) for node in (*forward, *backward)}
        blocks = number_blocks([paths[node] for node in forward])
        for node in forward:
            if is_random(node):
                self.add_generator_state(node)
            self.add(node, paths[node], blocks.get(paths[node], -1), self.recomputable(node))
        forward_ops = len(self.ops)
        self.add_tangents()
        for node in backward:
            self.add(node, paths[node], -1, recomputable=False)
            for step in self.placed.get(node, ()):
                self.add_step(step)
        self.add_hand_over()
        problem = RematProblem(tuple(self.ops), tuple(self.listed), forward_ops)
        return PricedGraph(problem, tuple(self.nodes), tuple(self.modules), tuple(self.values), self.priced_steps)

    def kept_results(self) -> set[int]:
        """Storages of results that are alive to the end."""
        gone = {*self.accumulated, *(step.position for steps in self.placed.values() for step in steps)}
        return {
            index
            for position, node in enumerate(self.results)
            if isinstance(node, fx.Node) and position not in gone
            for index in self.storages.of.get(node, ())
        }

    def add_step(self, step: PlacedStep) -> None:
        """The optimiser's step of one parameter."""
        after = frozenset(self.op_of[node] for node in step.before if node in self.op_of)
        self.priced_steps[len(self.ops)] = PricedStep(step.number, after)
        name = f"step_of_input_{step.number}"
        self.append(
            Op(name, 0.0, (self.number[step.storage],), (), self.rounded(step.workspace_bytes), recomputable=False)
        )

    def add(self, node: fx.Node, path: str, block: int, recomputable: bool) -> None:
        price = self.price_of(node)
        self.op_of[node] = len(self.ops)
        reads = [self.number[index] for index in self.storages.read_by(node) if index not in self.resident]
        if recomputable and is_random(node):
            reads.append(len(self.listed) - 1)
        made = self.storages.made_by(node)
        surplus = max(0, price.output_bytes - sum(self.storages.infos[index].bytes for index in made))
        makes = tuple(self.list_storage(index, surplus if index == made[0] else 0) for index in made)
        # A repeated draw puts the generator's present state aside.
        set_aside = GENERATOR_STATE_BYTES[_device_type(node)] if recomputable and is_random(node) else 0
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
            ),
            node.name,
            path,
        )

    def append(self, op: Op, node: str = "", path: str = "") -> None:
        self.ops.append(op)
        self.nodes.append(node)
        self.modules.append(path)

    def list_storage(self, index: int, surplus_bytes: int = 0) -> int:
        info = self.storages.infos[index]
        self.number[index] = len(self.listed)
        written = index in self.mutated or index in self.storages.written_over or index in self.stepped_by
        stays = written or info.bytes < self.least_moved_bytes
        value = "" if stays else self.value_of(index)
        nbytes = self.rounded(info.bytes + surplus_bytes)
        self.listed.append(Storage(info.name, nbytes, kept=index in self.kept, movable=bool(value)))
        self.values.append(value)
        return self.number[index]

    def value_of(self, index: int) -> str:
        """The node whose tensor a storage is: its maker, or an element of what that returns."""
        maker = self.storages.infos[index].maker
        if is_tangent(maker):
            return ""
        nodes = [maker] if isinstance(maker.meta.get("val"), torch.Tensor) else list(maker.users)
        return next((node.name for node in nodes if self.storages.of.get(node) == (index,)), "")

    def add_generator_state(self, node: fx.Node) -> None:
        """What a random op must keep to be repeated: an op of its own, so that keeping it is the schedule's choice."""
        if not self.recomputable(node):
            return
        device = _device_type(node)
        state_bytes = self.rounded(GENERATOR_STATE_BYTES[device])
        self.listed.append(Storage(f"{node.name}_state", state_bytes, movable=False))
        self.values.append("")
        self.append(Op(f"{node.name}_state", 0.0, (), (len(self.listed) - 1,), recomputable=False))

    def add_tangents(self) -> None:
        """The gradients of the outputs: autograd makes them before the backward and holds them until its end."""
        for node in self.graph.nodes:
            if is_tangent(node):
                self.kept.update(self.storages.of[node])
                makes = tuple(self.list_storage(index) for index in self.storages.of[node])
                self.append(Op(node.name, 0.0, (), makes, recomputable=False))

    def add_hand_over(self) -> None:
        """Autograd takes a gradient over as `.grad` where its strides are the parameter's, else it copies it, one after
        the other; the copy of an expanded gradient is larger than what it copies. It steps by it, too, where parameters
        are stepped in the backward, and this one is not yet."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and not is_tangent(node)]
        pairs = zip(inputs, self.results[self.forward_outputs :], strict=False)
        copied = [
            (self.rounded(self.storages.infos[index].bytes), self.rounded(storage_bytes(given.meta["val"])))
            for given, gradient in pairs
            if isinstance(gradient, fx.Node) and _strides(gradient) != _strides(given)
            for index in self.storages.of[gradient]
            if index in self.kept
        ]
        growth = sum(max(0, copy - original) for original, copy in copied)
        largest = max((original for original, _ in copied), default=0)
        done = {step.number for step in self.priced_steps.values()}
        given = {number for number, result in enumerate(self.results[self.forward_outputs :]) if result is not None}
        workspaces = (nbytes for number, nbytes in self.steps.workspaces.items() if number in given - done)
        workspace = growth + largest + self.rounded(max(workspaces, default=0))
        self.append(Op("hand_over_gradients", 0.0, (), (), workspace_bytes=workspace, recomputable=False))

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.block_bytes) * self.block_bytes

    def recomputable(self, node: fx.Node) -> bool:
        if not (is_pure(node) or is_random(node)) or not self.storages.of.get(node) or binds_new_symbols(node):
            return False
        if str(node.target).startswith(_DRAWS_SEEDS):
            return False
        reads_mutated = not self.mutated.isdisjoint(self.storages.read_by(node))
        position = _TRAINING_ARGUMENT.get(node.target)  # type: ignore[call-overload]
        trains = position is not None and node.args[position] is True
        return trains or not reads_mutated


def split_halves(graph: fx.Graph, fused: frozenset[fx.Node] = frozenset()) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes to schedule (those that make memory or have effects), forward and backward, each in program order."""
    late = backward_nodes(graph)
    scheduled = [node for node in graph.nodes if is_scheduled(node) and node not in fused]
    return [node for node in scheduled if node not in late], [node for node in scheduled if node in late]


def is_scheduled(node: fx.Node) -> bool:
    """Whether a schedule names the node; the others follow what they read, or run beside compute."""
    if node.op != "call_function" or node.target in TRANSFERS:
        return False
    return is_mutation(node) or not (is_view(node) or node.target is operator.getitem)


def is_mutation(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _strides(node: fx.Node) -> tuple[int, ...]:
    return node.meta["val"].stride()


def _device_type(node: fx.Node) -> str:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.device.type

"""From a joint graph to a `RematProblem`: its storages, seconds and workspaces, and which ops may be recomputed; and
the prices of single nodes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from memopt.device.calibration import calibrated_seconds
from memopt.device.device import Device
from memopt.device.devices import device_of
from memopt.device.hardware import Hardware
from memopt.device.op_call import OpCall, op_call
from memopt.device.storages import Storages, find_storages, is_mutation, is_view, storage_bytes
from memopt.device.time_model import node_seconds, runs_kernel
from memopt.device.workspace import measure_workspaces, op_dry_run
from memopt.price.priced_graph import (
    ALONE,
    GraphUse,
    MemoryUses,
    NodePrice,
    PricedGraph,
    Reduction,
)
from memopt.solver import Op, RematProblem, Storage
from memopt.solver.problem import BlockCall
from passes import is_pure, is_random
from passes.graphs.aliases import WAIT
from passes.graphs.node_facts import backward_nodes, binds_new_symbols, block_of, graph_results, is_tangent, module_path
from passes.ops.offload_ops import TRANSFERS

# This operator may be recomputed although the step writes to the running statistics that it reads: if its argument
# `training`, at this position, is True, the old statistics are ignored, and the new ones used only once.
_BATCH_NORM, _TRAINING = torch.ops.aten._native_batch_norm_legit_functional.default, 5

# Draws of seeds are saved: they are a few bytes, and random values are recomputed from them.
_DRAWS_SEEDS = "prims.inductor_seeds"

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
        use: what the step does with the graph's inputs and results."""
    return _Pricer(joint, forward_outputs, price_of, use).run()


@dataclass
class _Pricer:
    """The state of one call of `price`, whose arguments are its first fields."""

    joint: fx.GraphModule
    forward_outputs: int
    price_of: Callable[[fx.Node], NodePrice]
    use: GraphUse
    tangents: set[int] = field(default_factory=set)
    """Storages of the outputs' gradients of one of several regions, which live to the end of its backward."""
    listed: list[Storage] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)
    """Number of a storage in the graph → its position in `listed`."""
    ops: list[tuple[Op, str, str]] = field(default_factory=list)
    """Each op with the name of its node and its module path; both are "" for an op that stands for no node."""
    steps: dict[int, int] = field(default_factory=dict)
    waits: dict[int, frozenset[int]] = field(default_factory=dict)
    op_of: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, use = self.joint.graph, self.use
        self.storages: Storages = find_storages(graph, use.fused, use.reuses)
        self.results = graph_results(graph)
        self.inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
        self.resident = {
            index
            for index, block in enumerate(self.storages.blocks)
            if block.maker.op in ("placeholder", "get_attr") and not is_tangent(block.maker)
        }
        writers = [node for node in graph.nodes if node.op == "call_function" and is_mutation(node)]
        self.mutated = {index for node in writers for index in self.storages.of[node]}
        self.mutated.update(index for number in use.overwritten for index in self.storages_of_input(number))
        self.forward, self.backward = split_halves(graph, use.fused)
        self.placed = _steps_after(graph, self.storages, use, self.backward)
        placed = [step for steps in self.placed.values() for step in steps]
        # The storages of gradients that a parameter's step reads last and frees.
        self.stepped_by = {step.storage for step in placed}
        self.reduced = _reductions_after(use.reductions, self.results, self.storages, self.backward)
        reduced = [reduction for pairs in self.reduced.values() for reduction, _ in pairs]
        self.passed_on = use.passed_on or frozenset()
        gone = {*use.accumulated, *use.released, *self.passed_on, *(step.position for step in placed)}
        gone = gone.union(*(reduction.positions for reduction in reduced))
        # The storages that live to the end of the step, and those of outputs that are passed on: of all, and of those
        # that are held beyond the call's forward.
        self.kept = self.of_results(set(range(len(self.results))) - gone)
        outputs = set(range(self.forward_outputs))
        self.lent = self.passed_on_among(outputs)
        self.held = self.passed_on_among(outputs.difference(use.forward_only))
        # The storages of gradients that live to the end of the backward.
        self.given_on = self.passed_on_among(range(self.forward_outputs, len(self.results)))

    def run(self) -> PricedGraph:
        paths = {node: module_path(node) for node in (*self.forward, *self.backward)}
        blocks = number_blocks([paths[node] for node in self.forward])
        given = self.add_given(self.use.given)
        self.add_hosted()
        for node in self.forward:
            recomputable = self.recomputable(node)
            if recomputable and is_random(node):
                self.add_generator_state(node)
            self.add(node, paths[node], blocks.get(paths[node], -1), recomputable)
        # Results that the caller drops when the backward begins are alive until the forward ends.
        self.add_end(RETURN_OUTPUTS, self.of_results(self.use.released) - self.resident - self.kept)
        forward_ops = len(self.ops)
        self.add_tangents()
        self.add_end(PASSED_OUTPUTS, self.held)
        for node in self.backward:
            self.add(node, paths[node], -1, recomputable=False)
            for step in self.placed.get(node, ()):
                self.add_step(step)
            for reduction, gradients in self.reduced.get(node, ()):
                self.add_reduction(reduction, gradients)
        self.add_hand_over()
        if self.use.passed_on is not None:
            self.add_end(PASSED_GRADIENTS, self.given_on | self.tangents)
        ops, nodes, modules = zip(*self.ops, strict=True)
        problem = RematProblem(ops, tuple(self.listed), forward_ops)
        outputs = {
            position: self.number[index]
            for position in self.use.forward_only
            for index in self.storages.of.get(self.results[position], ())
            if index in self.lent - self.held and index in self.number
        }
        hosted, values = tuple(sorted(self.use.hosted)), tuple(self.values)
        return PricedGraph(problem, nodes, modules, values, self.steps, self.waits, outputs, given, hosted)

    def storages_of_input(self, number: int) -> tuple[int, ...]:
        return self.storages.of.get(self.inputs[number], ())

    def of_results(self, positions: Iterable[int]) -> set[int]:
        """The storages of the results at these positions."""
        return {index for at in positions for index in self.storages.of.get(self.results[at], ())}

    def passed_on_among(self, positions: Collection[int]) -> set[int]:
        """The storages of those results at these positions that are passed on before the end of the step."""
        return self.of_results(self.passed_on.intersection(positions)) - self.kept - self.resident

    def list_one(self, storage: Storage, value: str = "") -> int:
        """List a storage, which the tensor of the node named `value` fills; return its position in `listed`."""
        self.listed.append(storage)
        self.values.append(value)
        return len(self.listed) - 1

    def append(self, name: str, reads: Iterable[int] = (), makes: Iterable[int] = (), workspace_bytes: int = 0) -> None:
        """Append an op that takes no time and stands for no node."""
        self.ops.append((Op(name, 0.0, tuple(reads), tuple(makes), workspace_bytes, recomputable=False), "", ""))

    def add_given(self, numbers: Collection[int]) -> dict[int, int]:
        """Append the op that stands for the regions whose outputs are the inputs of these numbers, if there are any.

        It makes a storage without bytes for each such input, which the ops that read the input read: so a schedule
        shows where the input is needed. Returns number of an input → position of that storage in `listed`."""
        indices = ((number, index) for number in numbers for index in self.storages_of_input(number))
        linked = {number: index for number, index in indices if index not in self.mutated}
        for number, index in linked.items():
            self.number[index] = self.list_one(Storage(f"given_{number}", 0, movable=False))
            self.resident.discard(index)
        found = {number: self.number[index] for number, index in linked.items()}
        if linked:
            self.append(GIVEN, makes=found.values())
        return found

    def add_hosted(self) -> None:
        """Append an op for each input on the host that makes its storage; then "begin", when the first are copied."""
        for number in sorted(self.use.hosted):
            (index,) = self.storages_of_input(number)
            self.resident.discard(index)
            name, nbytes = self.inputs[number].name, self.rounded(self.storages.bytes[index])
            self.number[index] = self.list_one(Storage(name, nbytes, home=True), name)
            self.append(f"{name}_on_host", makes=[self.number[index]])
        if self.use.hosted:
            self.append("begin")

    def add_end(self, name: str, storages: set[int]) -> None:
        """Append an op that reads these storages, so that they live until then; no op where none is listed."""
        if reads := [self.number[index] for index in sorted(storages) if index in self.number]:
            self.append(name, reads)

    def add_step(self, step: _PlacedStep) -> None:
        """Append the optimizer's step of one parameter."""
        self.steps[len(self.ops)] = step.number
        self.waits[len(self.ops)] = frozenset(self.op_of[node] for node in step.before if node in self.op_of)
        workspace = self.rounded(step.workspace_bytes)
        self.append(f"step_of_input_{step.number}", [self.number[step.storage]], workspace_bytes=workspace)

    def add_reduction(self, reduction: Reduction, gradients: frozenset[int]) -> None:
        """Append the op in which a group's gradients are reduced; of the result each card keeps its share."""
        reads = sorted({self.number[index] for index in gradients if index in self.number})
        made = []
        if reduction.made_bytes:
            share = Storage(reduction.name, self.rounded(reduction.made_bytes), kept=True, movable=False)
            made.append(self.list_one(share))
        self.append(reduction.name, reads, made, self.rounded(reduction.buffer_bytes))

    def add(self, node: fx.Node, path: str, block: int, recomputable: bool) -> None:
        """Append the op of a node, which lies in the module `path` and in the repeated block number `block`, or -1."""
        price = self.price_of(node)
        self.op_of[node] = len(self.ops)
        reads = [self.number[index] for index in self.storages.read_by(node) if index not in self.resident]
        # To recompute a random op, the generator's present state is saved meanwhile.
        set_aside = 0
        if recomputable and is_random(node):
            reads.append(len(self.listed) - 1)
            set_aside = _device(node).generator_state_bytes
        made = self.storages.made_by(node)
        surplus = max(0, price.output_bytes - sum(self.storages.bytes[index] for index in made))
        makes = tuple(self.list_storage(index, surplus if index == made[0] else 0) for index in made)
        op = Op(
            name=node.name,
            seconds=price.seconds,
            reads=tuple(dict.fromkeys(reads)),
            makes=makes,
            workspace_bytes=self.rounded(price.workspace_bytes) + self.rounded(set_aside),
            recomputable=recomputable,
            block=block,
            attention=is_attention_core(node, path),
            calls=_numbered_calls(price.calls, self.storages.of.get(node, ()), made),
        )
        self.ops.append((op, node.name, path))

    def list_storage(self, index: int, surplus_bytes: int = 0) -> int:
        """List a storage of the graph, with `surplus_bytes` beyond its shape; return its position in `listed`."""
        own_bytes = self.storages.bytes[index]
        written = index in self.mutated or index in self.storages.written_over or index in self.stepped_by
        lent = index in self.lent or index in self.given_on  # a copy on the host frees nothing: eager code holds them
        fixed = written or lent or own_bytes < self.use.least_moved_bytes
        value = "" if fixed else self.value_of(index)
        name, nbytes = self.storages.blocks[index].maker.name, self.rounded(own_bytes + surplus_bytes)
        self.number[index] = self.list_one(Storage(name, nbytes, index in self.kept, movable=bool(value)), value)
        return self.number[index]

    def value_of(self, index: int) -> str:
        """The name of the node whose tensor fills a storage: its maker or an element of its results; "" if none."""
        maker = self.storages.blocks[index].maker
        if is_tangent(maker):
            return ""
        nodes = [maker] if isinstance(maker.meta.get("val"), torch.Tensor) else list(maker.users)
        return next((node.name for node in nodes if self.storages.of.get(node) == (index,)), "")

    def add_generator_state(self, node: fx.Node) -> None:
        """Append the op that saves the generator's state for a recomputable random node, until it is read last."""
        name, nbytes = f"{node.name}_state", self.rounded(_device(node).generator_state_bytes)
        self.append(name, makes=[self.list_one(Storage(name, nbytes, movable=False))])

    def add_tangents(self) -> None:
        """Append the ops that make the gradients of the outputs, which autograd holds until the end of the backward."""
        for node in filter(is_tangent, self.joint.graph.nodes):
            (self.kept if self.use.passed_on is None else self.tangents).update(self.storages.of[node])
            self.append(node.name, makes=[self.list_storage(index) for index in self.storages.of[node]])

    def add_hand_over(self) -> None:
        """Append the op in which autograd sets `.grad`, at the end of the backward.

        A gradient with the parameter's strides becomes `.grad` itself. Others are copied one after the other, and the
        copy of an expanded gradient is larger than the original. Where parameters are stepped in the backward, those
        that could not be stepped earlier are stepped here."""
        gradients = dict(enumerate(self.results[self.forward_outputs :]))
        receivers = {number: number for number in gradients} if self.use.receivers is None else self.use.receivers
        pairs = [(self.inputs[number].meta["val"], gradients[position]) for position, number in receivers.items()]
        copied = [
            (self.rounded(self.storages.bytes[index]), self.rounded(storage_bytes(given)))
            for given, gradient in pairs
            if isinstance(gradient, fx.Node) and isinstance(made := gradient.meta.get("val"), torch.Tensor)
            if made.stride() != given.stride()
            for index in self.storages.of[gradient]
            if index in self.kept
        ]
        growth = sum(max(0, copy - original) for original, copy in copied)
        largest = max((original for original, _ in copied), default=0)
        done = set(self.steps.values())
        left = {number for position, number in receivers.items() if gradients[position] is not None} - done
        workspaces = (nbytes for number, nbytes in self.use.step_workspaces.items() if number in left)
        workspace = growth + largest + self.rounded(max(workspaces, default=0))
        self.append("hand_over_gradients", workspace_bytes=workspace)

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
        trains = node.target is _BATCH_NORM and node.args[_TRAINING] is True
        return trains or self.mutated.isdisjoint(self.storages.read_by(node))


def _device(node: fx.Node) -> Device:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return device_of(first.device)


_PROJECTIONS = ("aten.mm.", "aten.addmm.")


def number_blocks(paths: Iterable[str]) -> dict[str, int]:
    """For each path of a module in a repeated block, the block's number. Paths outside of blocks are left out."""
    numbers: dict[str, int] = {}
    return {path: numbers.setdefault(block, len(numbers)) for path in paths if (block := block_of(path))}


def is_attention_core(node: fx.Node, path: str) -> bool:
    """Whether the node computes attention scores, their softmax or the weighted sum, and not a projection: judged by
    its operator, or by the `path` of its module where that names attention ("layers.0.attn")."""
    target = str(node.target)
    return "attention" in target or ("att" in path.lower() and not target.startswith(_PROJECTIONS))


def split_halves(graph: fx.Graph, fused: frozenset[fx.Node] = frozenset()) -> tuple[list[fx.Node], list[fx.Node]]:
    """The scheduled nodes of the forward and of the backward, each in program order, without `fused` ones."""
    late = backward_nodes(graph)
    scheduled = [node for node in graph.nodes if is_scheduled(node) and node not in fused]
    return [node for node in scheduled if node not in late], [node for node in scheduled if node in late]


def is_scheduled(node: fx.Node) -> bool:
    """Whether the node is an operator of a schedule: it allocates memory or has side effects.

    Views and elements of tuples are part of the node that they read, and copies to and from the host run beside."""
    if node.op != "call_function" or node.target in TRANSFERS:
        return False
    writes = is_mutation(node) or node.target is WAIT
    return writes or not (is_view(node) or node.target is operator.getitem)


def price_nodes(
    nodes: Sequence[fx.Node], card: Hardware, *, timed: bool = False, generated: frozenset[fx.Node] = frozenset()
) -> dict[fx.Node, NodePrice]:
    """Seconds and workspace of one evaluation of each node on `card`.

    On the CPU each distinct op is run once to measure what its kernel allocates and, if `timed`, its seconds; ops that
    are too large to run, and those of other devices, are estimated. If `timed`, the ops that make up most of the step
    are then timed one by one, on the CPU or on this machine's GPU. Nodes in `generated` run in kernels that a compiler
    generates, which have no temporaries."""
    if generated:
        prices = price_nodes([node for node in nodes if node not in generated], card, timed=timed)
        return prices | {node: NodePrice(node_seconds(node, card), 0) for node in nodes if node in generated}
    modelled = {node: node_seconds(node, card) for node in nodes}
    device = device_of(card)
    if not device.is_host:
        seconds = modelled | (_timed(modelled, torch.device(device.type)) if timed else {})
        return {node: _on_card(node, seconds[node], card) for node in nodes}
    found = measure_workspaces(nodes)
    seconds = dict(modelled)
    if timed:
        once = {node: measured.seconds for node, measured in found.items() if measured.seconds is not None}
        seconds |= once
        timed_here = once | _timed(seconds, torch.device(device.type))
        seconds |= {node: timed_seconds + card.between_seconds for node, timed_seconds in timed_here.items()}
    return {
        node: NodePrice(seconds[node], measured.workspace_bytes, measured.output_bytes or 0)
        for node, measured in found.items()
    }


def _on_card(node: fx.Node, seconds: float, card: Hardware) -> NodePrice:
    """The price of a node on a GPU. It has the allocator's calls within the node (`NodePrice.calls`) for operators that
    are written in Python, those of a library, and those that allocate results in another order than they return."""
    call, device = op_call(node), device_of(card)
    dry_run = None if call is None else op_dry_run(call, device.type, card.chip) or device.library_run(call, card.chip)
    if dry_run is None:
        workspace = 0 if call is None else device.workspace(call, card.chip)
        return NodePrice(seconds, workspace, calls=() if call is None else device.result_calls(call, workspace))
    return NodePrice(seconds, dry_run.workspace_bytes, calls=dry_run.calls)


def _timed(modelled: Mapping[fx.Node, float], device: torch.device) -> dict[fx.Node, float]:
    """Seconds, timed on the device, of the nodes that make up most of the step; `modelled` has the estimates of all."""
    calls = {node: call for node in modelled if runs_kernel(node) and (call := op_call(node)) is not None}
    expected: Counter[OpCall] = Counter()
    for node, call in calls.items():
        expected[call] += modelled[node]  # type: ignore[assignment]
    found = calibrated_seconds(expected, device)
    return {node: found[call] for node, call in calls.items() if call in found}


_REGION_SECONDS = 2.5e-3
"""Seconds of a region: its guards, the check of what the device holds, autograd's node."""
_GRADIENT_SECONDS = 40e-6
"""Seconds of an input with a gradient: its guard, its place among the inputs, the return of its gradient."""


def host_seconds(regions: int, gradients: int) -> float:
    """Seconds that the host needs for a planned step beyond those for the same operators in a plain step: a constant
    for each of its `regions`, and one for each of the parameters' `gradients`.

    On a CPU they add to the step; on a GPU they are hidden while its queue of kernels is not empty. Both constants were
    measured on one core of a server (`benchmarks/host_time.py`)."""
    return regions * _REGION_SECONDS + gradients * _GRADIENT_SECONDS


@dataclass(frozen=True)
class _PlacedStep:
    """The optimizer's step of one parameter within the backward, with the nodes that must run before it."""

    position: int
    """The position of the gradient among the results."""
    number: int
    """The number of the parameter among the inputs."""
    storage: int
    """The number of the gradient's storage in `Storages`."""
    before: tuple[fx.Node, ...]
    """The nodes that must have run before it."""
    workspace_bytes: int
    """Bytes that the step takes beside the parameter, its gradient and its state."""


def _steps_after(
    graph: fx.Graph, storages: Storages, use: GraphUse, backward: Sequence[fx.Node]
) -> dict[fx.Node, list[_PlacedStep]]:
    """For each node of `backward`, in order, the parameters that the optimizer may step right after it."""
    if not use.stepped:
        return {}
    uses = MemoryUses(graph, storages)
    order = {node: number for number, node in enumerate(backward)}
    found: dict[fx.Node, list[_PlacedStep]] = {}
    for position, number in sorted(use.stepped.items()):
        before = uses.before_step(position, number) or []
        last = max((node for node in before if node in order), key=order.__getitem__, default=None)
        if last is not None:
            given, gradient = uses.inputs[number].meta["val"], uses.results[position].meta["val"]
            # A gradient that lies in memory in another order is copied.
            copy = storage_bytes(given) if gradient.stride() != given.stride() else 0
            (made,) = storages.of[uses.results[position]]
            step = _PlacedStep(position, number, made, tuple(before), use.step_workspaces[number] + copy)
            found.setdefault(last, []).append(step)
    return found


def _reductions_after(
    reductions: Collection[Reduction], results: Sequence[Any], storages: Storages, backward: Sequence[fx.Node]
) -> dict[fx.Node, list[tuple[Reduction, frozenset[int]]]]:
    """For each node of `backward`, in order, the reductions right after it, with their gradients' storages."""
    if not reductions:
        return {}
    order = {node: number for number, node in enumerate(backward)}
    found: dict[fx.Node, list[tuple[Reduction, frozenset[int]]]] = {}
    for reduction in reductions:
        given = [results[position] for position in reduction.positions]
        own = {index for node in given if isinstance(node, fx.Node) for index in storages.of.get(node, ())}
        # A view of the gradient may come later than the node that makes its memory.
        nodes = [*given, *(storages.blocks[index].maker for index in own)]
        last = max((node for node in nodes if node in order), key=order.__getitem__, default=None)
        if last is not None:
            found.setdefault(last, []).append((reduction, frozenset(own)))
    return found


def _numbered_calls(calls: Sequence[BlockCall], results: Sequence[int], made: Sequence[int]) -> tuple[BlockCall, ...]:
    """The allocations and frees within a node, renumbered: `calls` number blocks by the node's results, the tuple
    returned numbers them by the storages that the node makes, as `Op.calls` does. A result that is written over an
    operand has no block of its own.

    Args:
        results: the storage of each of the node's results.
        made: the storages among `results` that the node makes."""
    places = {number: made.index(storage) for number, storage in enumerate(results) if storage in made}
    beyond = len(made) - len(results)
    return tuple(
        BlockCall(call.allocates, places.get(call.block, call.block + beyond), call.bytes)
        for call in calls
        if call.block in places or call.block >= len(results)
    )

"""A joint graph as a problem in bytes and seconds, and how the graph is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from memopt.account.account import EAGER
from memopt.capture.captured_call import EagerCodeBytes
from memopt.device.storages import Storages, find_storages, is_mutation, storage_bytes
from memopt.solver import Op, RematProblem, Storage
from memopt.solver.problem import BlockCall
from passes.graphs.node_facts import graph_results, is_tangent


class MemoryUses:
    """The readers of each storage of a joint graph; nodes that no schedule names, such as views, are included."""

    def __init__(self, graph: fx.Graph, storages: Storages) -> None:
        self.storages, self.readers = storages, storages.readers
        self.output, self.results = graph.output_node(), graph_results(graph)
        self.inputs = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
        self.returned = Counter(index for result in self.results for index in storages.of.get(result, ()))

    def before_step(self, position: int, number: int) -> list[fx.Node] | None:
        """The nodes that must run before the optimizer steps the parameter at input `number` with the gradient at
        result `position`, in program order: the gradient's producer, and all that read the storage of parameter or
        gradient.

        None where the step has to wait for the end of the backward: the parameter's storage is returned, or the
        gradient's storage also belongs to another result or existed before the backward."""
        gradient = self.results[position]
        assert isinstance(gradient, fx.Node)
        own, made = (self.storages.of.get(node, ()) for node in (self.inputs[number], gradient))
        if len(own) != 1 or len(made) != 1 or self.returned[own[0]] or self.returned[made[0]] != 1:
            return None
        maker = self.storages.blocks[made[0]].maker
        if maker.op != "call_function":
            return None
        readers = (node for index in (own[0], made[0]) for node in self.readers.get(index, ()))
        return [maker, *(node for node in readers if node is not self.output)]


def hostable(graph: fx.Graph, numbers: Collection[int], least_bytes: int) -> dict[int, int]:
    """The bytes of those inputs among `numbers` that may lie on the host, by input number, in the order in which they
    are first read. The graph must only read them; inputs below `least_bytes` are left out."""
    storages = find_storages(graph)
    uses = MemoryUses(graph, storages)
    order = {node: place for place, node in enumerate(graph.nodes)}
    found: dict[int, tuple[int, int]] = {}
    for number in numbers:
        own = storages.of.get(uses.inputs[number], ())
        readers = list(uses.readers.get(own[0], ())) if len(own) == 1 else []
        written = any(map(is_mutation, readers))
        nbytes = storage_bytes(uses.inputs[number].meta["val"])
        if readers and not written and not uses.returned[own[0]] and nbytes >= max(1, least_bytes):
            found[number] = min(map(order.__getitem__, readers)), nbytes
    return {number: found[number][1] for number in sorted(found, key=found.__getitem__)}


@dataclass(frozen=True)
class Reduction:
    """The gradients of one group of parameters, which are reduced over ranks together once all of them are computed."""

    name: str
    """The name of its op."""
    positions: frozenset[int]
    """The positions of the gradients among all results of the joint graph."""
    buffer_bytes: int
    """Bytes that the reduction takes beside the gradients, beyond those of the account."""
    made_bytes: int
    """Bytes of one card's share of the result; 0 where it is added to gradients that are held already."""


@dataclass(frozen=True)
class NodePrice:
    """The cost of one evaluation of a node: seconds, and the bytes of its kernel's own temporaries."""

    seconds: float
    workspace_bytes: int
    output_bytes: int = 0
    """Bytes that its results hold as measured, if more than by shape (a loss reduced in place); else 0."""
    calls: tuple[BlockCall, ...] = ()
    """The allocator's calls within it, its results' blocks numbered as returned; empty where not known (`Op.calls`)."""


@dataclass(frozen=True)
class PricedGraph:
    """A joint graph as a problem of the solver. `nodes[i]` is the name of op `i`'s node, "" for an op without one."""

    problem: RematProblem
    nodes: tuple[str, ...]
    modules: tuple[str, ...]
    """The module path of each op, "" where none is known."""
    values: tuple[str, ...] = ()
    """For each storage the node whose tensor it is, "" for one that cannot be offloaded (`Storage.movable`)."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """For each op that is the optimizer's step of a parameter within the backward, and stands for no node: the number
    of the parameter among the graph's inputs."""
    waits: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """For each of these ops, the ops that read the parameter or its gradient: it comes after all their evaluations."""
    outputs: Mapping[int, int] = field(default_factory=dict)
    """For one of several regions, position of an output held in the call's forward only → its storage's number."""
    given: Mapping[int, int] = field(default_factory=dict)
    """Number of an input that is another region's output → number of a storage of no bytes, read where the input is."""
    hosted: tuple[int, ...] = ()
    """The numbers of the inputs that lie on the host, and are copied to the device before they are read."""


@dataclass(frozen=True)
class GraphUse:
    """How a step uses a joint graph's inputs and results; by default the graph is the whole step."""

    accumulated: Collection[int] = ()
    """Positions, among all results, of the gradients that are added to an existing `.grad` as soon as they are made."""
    fused: frozenset[fx.Node] = frozenset()
    """Nodes whose values never lie in memory; no schedule names them."""
    least_moved_bytes: int = 0
    """Smaller values cannot be offloaded."""
    block_bytes: int = 1
    """Memory is allocated in multiples of this."""
    stepped: Mapping[int, int] = field(default_factory=dict)
    """Position of the gradient among the results → number of a parameter that the optimizer steps in the backward, as
    soon as possible."""
    step_workspaces: Mapping[int, int] = field(default_factory=dict)
    """Number of a parameter that it steps in the backward, there or one by one at its end → bytes that the step takes
    beside the parameter, its gradient and its state."""
    reuses: Collection[tuple[str, str]] = ()
    """The calls of the backward whose results take an operand's memory, each with that operand."""
    released: Collection[int] = ()
    """Positions of the forward's results that its caller holds to the end of the forward only."""
    passed_on: frozenset[int] | None = None
    """For one of several regions, the positions of outputs held until its backward begins, and of gradients that other
    code has afterwards; None for the only region."""
    forward_only: Collection[int] = ()
    """Those of the outputs in `passed_on` that nobody holds any more once the call's forward is over."""
    given: Collection[int] = ()
    """The numbers of the inputs that are outputs of earlier regions."""
    overwritten: Collection[int] = ()
    """The numbers of the inputs that are overwritten by the end of the forward: what reads one is not recomputed."""
    reductions: Collection[Reduction] = ()
    """The groups of gradients that are reduced over cards when complete, each card keeping its share."""
    decisions: frozenset[fx.Node] = frozenset()
    """Nodes of the forward that are never recomputed, since a second evaluation might decide otherwise."""
    hosted: Collection[int] = ()
    """The numbers of the inputs that lie on the host, among those that `hostable` finds."""
    receivers: Mapping[int, int] | None = None
    """Position among the gradients → number of the input whose gradient it is; None where these are equal."""


ALONE = GraphUse()


def with_eager(priced: PricedGraph, number: int, eager: Sequence[EagerCodeBytes]) -> PricedGraph:
    """The priced region `number` of a call, with further ops and storages for what eager code holds around it.

    The most that eager code holds before the region's forward, and before its backward, becomes the workspace of one op
    each. What it holds while the forward or the backward runs becomes a storage that lives as long.

    Args:
        eager: an entry for each region, then one for the whole call. In this last entry, `before` is the most held
            after the call's last backward; the first region gets an op for it, since its backward is the last.
            `before_backward` is the most held from the end of the last region's forward to the end of the call's
            forward; the last region gets an op for it. `during` is held from the end of the call's forward until the
            last region's backward; the last region gets a storage for it."""
    problem, own, around = priced.problem, eager[number], eager[-1]
    last = number == len(eager) - 2
    forward, backward, held = (len(problem.storages) + more for more in range(3))
    storages = [
        Storage(f"{EAGER}_forward", own.during, movable=False),
        Storage(f"{EAGER}_backward", own.during_backward, movable=False),
    ]
    before = [_op(workspace_bytes=own.before), _op(makes=(forward,))]
    between = [_op(reads=(forward,))]
    most_back = own.before_backward
    if last:
        storages.append(Storage(f"{EAGER}_held", around.during, movable=False))
        between += [_op(workspace_bytes=around.before_backward), _op(makes=(held,))]
        most_back = max(0, most_back - around.during)
    back = [_op(reads=(held,) if last else (), workspace_bytes=most_back), _op(makes=(backward,))]
    after = [_op(reads=(backward,))]
    if number == 0:
        after.append(_op(workspace_bytes=around.before))
    end = problem.forward_ops
    split = end + (problem.tangents if last else 0)  # its tangents come before the backward begins
    inside = list(zip(problem.ops, priced.nodes, priced.modules, strict=True))
    rows = [*before, *inside[:end], *between, *inside[end:split], *back, *inside[split:], *after]
    ops, nodes, modules = zip(*rows, strict=True)
    problem = RematProblem(ops, (*problem.storages, *storages), end + len(before) + len(between))
    values = (*priced.values, *("" for _ in storages))
    return replace(priced, problem=problem, nodes=nodes, modules=modules, values=values)


def _op(reads: tuple[int, ...] = (), makes: tuple[int, ...] = (), workspace_bytes: int = 0) -> tuple[Op, str, str]:
    """An op of eager code, which has neither a node nor a module."""
    return Op(EAGER, 0.0, reads, makes, workspace_bytes, recomputable=False), "", ""

"""Makes planned regions callable, with the backend that their joint graphs were traced for: partitions each joint graph
by its schedule into forward and backward."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from memopt.capture.data_sizes import guard_sizes
from memopt.capture.joint import JointGraph
from memopt.compat.operators import OpOverload
from memopt.compat.saved_tensors import set_versions
from memopt.compat.tensors import storage_key
from memopt.compat.tracing import boxed, extract_halves, first_runs_as_later_ones, mark_boxed
from memopt.device.storages import find_storages
from memopt.device.workspace import COLLECTIVES
from memopt.emit.gradients import Accumulation, accumulate_in_place, is_reached, telling, withholding
from memopt.emit.inductor import compile_by_backend
from memopt.planning.plan import Plan
from memopt.planning.refit import Footprint
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph
from memopt.price.priced_graph import MemoryUses
from passes import Reinplace
from passes.apply_schedule import BACKWARD
from passes.graphs.node_facts import graph_results, is_tangent


@dataclass(frozen=True, eq=False)
class Emitted:
    """A region as a function of its inputs, with the bytes that its compiled code holds."""

    run: Callable[..., Any] = field(repr=False)
    footprint: Footprint | None = None
    """The bytes that its compiled forward and backward hold; None where the plan's own figures are used."""
    exchanges: int = 0
    """A digest of the collectives that its forward and backward run: equal on two ranks that run the same ones in the
    same order, 0 where there are none."""


def emit_plan(plan: Plan, accumulation: Accumulation) -> tuple[Emitted, ...]:
    """The regions of a planned call as functions, in the order of the forward.

    `accumulation` says, in each backward, how gradients reach `.grad`. Raises `CaptureError` where inductor fails to
    compile a region."""
    captured = plan.captured
    assert captured is not None, "a plan loaded from a file has no graphs to make functions from: plan the call again"
    return tuple(
        emit_region(joint, schedule, accumulation, captured.sizes_of(number), plan)
        for number, (joint, schedule) in enumerate(zip(captured.regions, plan.regions, strict=True))
    )


def emit_region(
    joint: JointGraph,
    schedule: RegionSchedule,
    accumulation: Accumulation,
    allowed_sizes: Mapping[str, int],
    plan: Plan | None = None,
) -> Emitted:
    """One region as a differentiable function of its inputs, whose forward and backward follow `schedule`. The forward
    raises `SizeOutgrown` where a data-dependent size is above its limit in `allowed_sizes`, by symbol.

    With a `plan` for CUDA, torch's allocator holds no more than its budget while compiled kernels are timed. A compiled
    backward adds gradients to `.grad`, where `accumulation` allows it, only if the plan counts on existing ones."""
    # A compiled backward clones the gradients that it cannot add to an existing `.grad`.
    adds = plan is None or plan.account.gradients_held or not joint.fused
    limit_bytes = plan.budget_bytes - plan.account.context if plan is not None and plan.account.caching else None
    exchanges = 0

    def cut(*_: Any, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        nonlocal exchanges
        forward, backward = partition(joint, schedule, accumulation if adds else None)
        guard_sizes(forward, allowed_sizes)
        exchanges = exchanges_of(forward.graph, backward.graph)
        return forward, backward

    with joint.trace.active(), first_runs_as_later_ones():
        footprint: Footprint | None = None
        if joint.fused:
            run, footprint = compile_by_backend(joint, cut, accumulation, allowed_sizes, limit_bytes)
        else:
            versions = _Versions(joint.statistics)
            compiled = joint.trace.aot.compile(
                cut,
                lambda forward, _: versions.kept_by(boxed(forward)),
                lambda backward, _: telling(withholding(boxed(backward), joint), accumulation),
            )
            run = versions.noted_by(compiled)
    return Emitted(detaching(run, joint.inputs_without_gradients), footprint, exchanges)


def detaching(run: Callable[..., Any], positions: Collection[int]) -> Callable[..., Any]:
    """A function that calls `run`, the function of a region, with the inputs at `positions` detached. These inputs get
    no gradient: if their autograd nodes were visited in the backward, hooks would be called with None, and DDP would
    count the parameters as used."""
    if not positions:
        return run

    def run_detached(*inputs: Any) -> Any:
        return run(*(value.detach() if at in positions else value for at, value in enumerate(inputs)))

    return run_detached


class _Versions:
    """Sets the version counters (`Tensor._version`) of the region's inputs at the positions `numbers` back after its
    forward. These are running statistics of batch norms: eager kernels write to them without raising the counter.
    AOTAutograd raises it before it runs the forward; after a second forward, autograd would then refuse the backward of
    the first, which saved them."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = sorted(numbers)
        self._before: list[tuple[torch.Tensor, int]] = []

    def noted_by(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, the function of a region, which first notes the counters of these inputs."""

        def noting(*inputs: Any) -> Any:
            self._before = [(inputs[number], inputs[number]._version) for number in self._numbers]
            try:
                return run(*inputs)
            finally:
                self._before = []

        return noting if self._numbers else run

    def kept_by(self, forward: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """`forward`, the region's forward, which at its end sets the counters back to those noted, before autograd
        saves any input."""

        def keeping(arguments: list[Any]) -> Any:
            results = forward(arguments)
            set_versions(*zip(*self._before, strict=True))
            return results

        return mark_boxed(keeping) if self._numbers else forward


def partition(
    joint: JointGraph, schedule: RegionSchedule, accumulation: Accumulation | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward modules of a region. Results are written over operands as `JointGraph.reuses` says. With
    `accumulation`, gradients are added to `.grad` in place, and parameters are stepped as the schedule says."""
    scheduled = scheduled_graph(joint, schedule)
    saved, symbols, objects = _crossing(scheduled.graph, joint.forward_outputs)
    forward, backward = extract_halves(scheduled, saved, symbols, objects, joint.forward_outputs)
    steps = nodes_before_steps(joint, scheduled, backward, schedule.steps)
    if joint.reuses:
        backward = Reinplace(joint.reuses)(backward)
    if accumulation is not None:
        first, tensors = joint.forward_outputs, joint.tensor_positions
        inputs = {position - first: tensors[number] for position, number in joint.parameter_gradients.items()}
        own = {position - first for position in joint.own_gradients} if accumulation.exchange is not None else ()
        reached = {
            position: partial(is_reached, tangents, joint.tangents)
            for position, tangents in joint.partial_gradients.items()
        }
        accumulate_in_place(backward, inputs, accumulation, steps, own, reached)
    return forward, backward


def _crossing(graph: fx.Graph, forward_outputs: int) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """The forward's values that the backward reads or returns, in three lists: tensors, including those offloaded to
    the host, sizes, and other objects."""
    returned = set(graph_results(graph)[forward_outputs:])
    tensors: list[fx.Node] = []
    sizes: list[fx.Node] = []
    objects: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "output" or is_tangent(node) or _is_backward(node):
            continue
        if node in returned or any(user.op != "output" and _is_backward(user) for user in node.users):
            value = node.meta["val"]
            kind = tensors if isinstance(value, torch.Tensor) else sizes if isinstance(value, _NUMBERS) else objects
            kind.append(node)
    return tensors, sizes, objects


_NUMBERS = (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_backward(node: fx.Node) -> bool:
    """Whether the schedule puts a node into the backward."""
    return node.meta.get("partitioner_tag") == BACKWARD


def nodes_before_steps(
    joint: JointGraph, scheduled: fx.GraphModule, backward: fx.GraphModule, numbers: Sequence[int]
) -> dict[int, set[str]]:
    """For each parameter to step, the names of the backward's nodes that must run before the step: the node that makes
    its gradient, and all that read the storage of parameter or gradient through any alias, recomputed nodes included.
    The keys are the positions of the gradients among the backward's results.

    `numbers` are the positions of the parameters to step among the region's inputs. `backward` was extracted from
    `scheduled`, the scheduled graph. The nodes are found anew in `scheduled`, to notice an error of the planner."""
    if not numbers:
        return {}
    named = {node.name: node.target for node in scheduled.graph.nodes}
    calls = [node for node in backward.graph.nodes if node.op == "call_function"]
    assert all(named.get(node.name) == node.target for node in calls), (
        "a node of the schedule has another name in the backward"
    )
    uses = MemoryUses(scheduled.graph, find_storages(scheduled.graph))
    found: dict[int, set[str]] = {}
    for position, number in joint.parameter_gradients.items():
        before = uses.before_step(position, number) if number in numbers else None
        if before is not None:
            late = {node.name for node in before if node.meta.get("partitioner_tag") == BACKWARD}
            found[position - joint.forward_outputs] = late
    assert len(found) == len(numbers), "a parameter's step is planned in the backward but must come after it"
    return found


def check_own_memory(inputs: Sequence[Any], numbers: Sequence[int]) -> None:
    """Raise `ValueError` where a parameter that is stepped in the backward (at one of the positions `numbers`) shares
    storage with another input of the region: nodes that read that input are not known to read the parameter."""
    if not numbers:
        return
    held = Counter(storage_key(value) for value in inputs if isinstance(value, torch.Tensor))
    for number in numbers:
        assert isinstance(inputs[number], nn.Parameter)
        if held[storage_key(inputs[number])] > 1:
            raise ValueError(
                f"a parameter of shape {tuple(inputs[number].shape)} shares its memory with another tensor that the "
                "model reads, and the plan counts on stepping it within the backward; give the model a copy, or leave "
                "optimizer_in_backward out of allow"
            )


def sharing_memory(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that share their storage with another parameter or a buffer."""
    tensors: Iterable[torch.Tensor] = (*model.parameters(), *model.buffers())
    held = Counter(storage_key(tensor) for tensor in tensors)
    return [parameter for parameter in model.parameters() if held[storage_key(parameter)] > 1]


_BYTES = 7
"""The bytes of a digest, so that it fits into an int64."""


def exchanges_of(*graphs: fx.Graph) -> int:
    """A digest of the collectives (operators and shapes, in order) in graphs that run in this order; 0 for none."""
    nodes = [node for graph in graphs for node in graph.nodes if isinstance(node.target, OpOverload)]
    calls = [node for node in nodes if node.target.namespace in COLLECTIVES]
    if not calls:
        return 0
    text = repr([(str(node.target), tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) for node in calls])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_BYTES], "big")

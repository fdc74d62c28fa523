"""Halves with offloaded values equal the joint graph, and hold the bytes that the simulator predicts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx

from examples.models.problems import random_schedule
from memopt.capture.joint import JointGraph
from memopt.device.storages import find_storages
from memopt.emit.emit import partition
from memopt.planning.joined import Joined, join
from memopt.planning.priced_step import TracedStep
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph, split
from memopt.price.price import is_scheduled, price
from memopt.price.priced_graph import NodePrice
from memopt.solver import Link, Offload, RematProblem, Schedule, simulate
from passes.graphs.node_facts import is_tangent
from passes.ops.offload_ops import AWAIT_OUT, COPY_OUT, TRANSFERS, host_memory
from tests.emit.test_partition import joint_of, run_halves, without_repeated_results
from tests.passes.capture import Captured, gpt2, resnet, rows_above_zero, run
from tests.planned import region

FREE = Link(math.inf)


def joined(*joints: JointGraph) -> Joined:
    return join([price(joint.module, joint.forward_outputs, lambda _: NodePrice(1.0, 0)) for joint in joints])


def regions(joints: Sequence[JointGraph], problem: Joined, schedule: Schedule) -> tuple[RegionSchedule, ...]:
    return split(problem, TracedStep("Model", tuple(joints)), schedule)


def random_plan(problem: RematProblem, seed: int | None) -> Schedule:
    """A schedule with random offloads between two uses of a value, and with random recomputation unless `seed` is
    None."""
    state = random.Random(seed or 0)
    schedule = Schedule.save_all(problem)
    if seed is not None:
        schedule = without_repeated_results(problem, random_schedule(state, problem))
    used: dict[int, int] = {}
    offloads = []
    for position, index in enumerate(schedule.evaluations):
        for storage in problem.ops[index].reads:
            info = problem.storages[storage]
            if info.movable and not info.kept and position > used[storage] + 1 and state.random() < 0.5:
                out_after = state.randrange(used[storage], position - 1)
                freed, fetch = sorted(state.randrange(out_after + 1, position + 1) for _ in range(2))
                offloads.append(Offload(storage, out_after, freed, fetch, position))
        used |= dict.fromkeys((*problem.ops[index].reads, *problem.ops[index].makes), position)
    return Schedule(schedule.evaluations, tuple(offloads))


@pytest.mark.parametrize("model", [gpt2, resnet, rows_above_zero])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_halves_equal_the_joint_graph(model: Callable[[], Captured], seed: int | None) -> None:
    captured, joint = model(), joint_of(model())
    problem = joined(joint)
    halves = partition(joint, regions([joint], problem, random_plan(problem.problem, seed))[0])
    assert any(node.target is COPY_OUT for half in halves for node in half.graph.nodes)
    for ours, theirs in zip(run_halves(captured, *halves), run(captured, joint.module), strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs
    assert host_memory("cpu").leased_bytes == 0


def test_two_forwards_before_their_backwards() -> None:
    """The offloaded values of two runs of one region are kept apart, in whichever order the backwards run."""
    joint = region(3)
    problem = joined(joint)
    forward, backward = partition(joint, regions([joint], problem, random_plan(problem.problem, None))[0])
    saved = [node.name for node in forward.graph.output_node().args[0]]
    given = [node.name for node in backward.graph.find_nodes(op="placeholder")]

    def inputs(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        values = (node.meta["val"] for node in forward.graph.find_nodes(op="placeholder"))
        return [torch.randn(value.shape) for value in values]

    def run_backward(returned: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        values = {**dict(zip(saved, returned, strict=True)), "tangents_1": torch.ones(())}
        return backward(*(values[name] for name in given))

    with torch.no_grad():
        alone = [run_backward(forward(*inputs(seed))) for seed in range(2)]
        first, second = forward(*inputs(0)), forward(*inputs(1))
        assert host_memory("cpu").leased_bytes > 0
        together = [run_backward(second), run_backward(first)][::-1]
    for ours, theirs in zip(together, alone, strict=True):
        assert all(map(torch.equal, ours[:-1], theirs[:-1]))
    assert not torch.equal(alone[0][0], alone[1][0])


def live_bytes(graph: fx.Graph, tangents: int) -> list[int]:
    """Device bytes that are live at each evaluation of a scheduled graph. A value that is copied out counts until
    compute has waited for the copy, one that is fetched from the start of the copy, and the tangents from evaluation
    `tangents` on."""
    found = find_storages(graph)
    count = sum(map(is_scheduled, graph.nodes))
    returned = {index for node in graph.output_node().all_input_nodes for index in found.of[node]}
    spans: dict[int, list[int]] = {}
    following = 0
    for node in graph.nodes:
        place = following - 1 if node.target in (COPY_OUT, AWAIT_OUT) else following
        for index in (*found.made_by(node), *found.read_by(node)):
            if is_scheduled(node) or node.target in TRANSFERS:
                spans.setdefault(index, []).append(place)
        if is_tangent(node):
            spans[found.of[node][0]] = [tangents, count - 1]
        following += is_scheduled(node)
    live = [0] * count
    for index, places in spans.items():
        if found.blocks[index].maker.op == "placeholder" and not is_tangent(found.blocks[index].maker):
            continue
        last = count - 1 if index in returned else max(places)
        for place in range(min(places), min(last, count - 1) + 1):
            live[place] += found.bytes[index]
    return live


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_graph_holds_what_the_simulator_says(seed: int | None) -> None:
    joint = joint_of(resnet())
    problem = joined(joint)
    schedule = random_plan(problem.problem, seed)
    assert schedule.offloads
    (one,) = regions([joint], problem, schedule)
    simulated = simulate(problem.problem, schedule, FREE).live_bytes
    nodes = problem.prices[0].nodes
    named = [int(live) for live, op in zip(simulated, schedule.evaluations, strict=True) if nodes[op]]
    late = schedule.evaluations.index(problem.prices[0].problem.forward_ops)
    tangents = sum(bool(nodes[op]) for op in schedule.evaluations[:late])
    assert live_bytes(scheduled_graph(joint, one).graph, tangents) == named


def test_while_another_region_runs_nothing_can_be_copied() -> None:
    """A value to be freed or fetched while another region runs is freed by the end of its own forward, and fetched in
    its own backward."""
    joints = [region(2, loss=False), region(2, first=2)]
    problem = joined(*joints)
    plain = Schedule.save_all(problem.problem)
    forward = problem.prices[0].problem.forward_ops
    storage = problem.prices[0].values.index("gelu")
    read = max(place for place, op in enumerate(problem.problem.ops) if storage in op.reads)
    for freed, fetch in ((forward + 1, forward + 2), (forward + 2, read - 1), (2, 3)):
        schedule = Schedule(plain.evaluations, (Offload(storage, 1, freed, fetch, read),))
        first, second = regions(joints, problem, schedule)
        assert second.offloads == ()
        (stay,) = first.offloads
        assert stay.value == "gelu"
        assert (stay.out_after, stay.freed_before) == (1, min(freed, first.boundary))
        assert stay.fetch_from >= min(fetch, first.boundary)
        assert first.evaluations[stay.back_before] == problem.prices[0].nodes[problem.owner[read][1]]


def test_storages_that_cannot_be_offloaded() -> None:
    """Generator states, results, and values that the step writes to cannot be offloaded; every other storage has a
    node."""
    joint = joint_of(resnet())
    found = joined(joint)
    for storage, value in zip(found.problem.storages, found.prices[0].values, strict=True):
        assert storage.movable == bool(value)
    names = {node.name for node in joint.module.graph.nodes}
    assert names.issuperset(filter(None, found.prices[0].values))
    states = [storage for storage in joined(joint_of(gpt2())).problem.storages if storage.name.endswith("_state")]
    assert states
    assert not any(state.movable for state in states)

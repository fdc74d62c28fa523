"""The halves that run equal the joint graph, and hold the bytes that the simulator predicts at every moment."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from examples.models.problems import random_schedule
from memopt.capture.joint import JointGraph
from memopt.device.storages import find_storages
from memopt.emit.emit import partition
from memopt.emit.gradients import Accumulation
from memopt.planning.schedule_parts import RegionSchedule, scheduled_graph
from memopt.price.price import is_scheduled, price
from memopt.price.priced_graph import GraphUse, NodePrice, PricedGraph
from memopt.solver import RematProblem, Schedule, simulate
from passes import format_graph
from passes.graphs.node_facts import is_tangent
from tests.passes.capture import Captured, Sketch, aten, dynamic_mlp, gpt2, resnet, rows_above_zero, run


def joint_of(captured: Captured, *, reinplace: bool = False) -> JointGraph:
    parameters = (n for n, given in enumerate(captured.inputs) if isinstance(given, torch.nn.Parameter))
    return JointGraph.of(captured.graph_module, captured.forward_outputs, frozenset(parameters), reinplace=reinplace)


def priced(joint: JointGraph) -> PricedGraph:
    return price(joint.module, joint.forward_outputs, lambda _: NodePrice(1.0, 0), GraphUse(reuses=joint.reuses))


def region_schedule(graph: PricedGraph, schedule: Schedule) -> RegionSchedule:
    boundary = schedule.evaluations.index(graph.problem.forward_ops)  # the tangents, which exist in the backward only
    names = [graph.nodes[op] for op in schedule.evaluations]
    return RegionSchedule("", tuple(filter(None, names)), len(list(filter(None, names[:boundary]))))


def run_halves(captured: Captured, forward: fx.GraphModule, backward: fx.GraphModule) -> list[Any]:
    """The values that `tests.passes.capture.run` returns for the joint graph: results, inputs, and the generator's
    state."""
    inputs = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in captured.inputs]
    handed: dict[str, Any] = {}
    results: list[Any] = []
    torch.manual_seed(1)
    for half in (forward, backward):
        placeholders = half.graph.find_nodes(op="placeholder")
        given = dict(zip((node.name for node in placeholders), inputs, strict=False)) if half is forward else handed
        tangents = iter(inputs[-sum(map(is_tangent, placeholders)) :])
        values = [next(tangents) if is_tangent(node) else given[node.name] for node in placeholders]
        with torch.no_grad():
            returned = fx.Interpreter(half).run(*values, enable_io_processing=False)
        names = [node.name if isinstance(node, fx.Node) else "" for node in half.graph.output_node().args[0]]
        handed = dict(zip(names, returned, strict=True))
        results += returned[: captured.forward_outputs] if half is forward else returned
    return [*results, *inputs, torch.get_rng_state()]


@pytest.mark.parametrize("model", [gpt2, resnet, dynamic_mlp, rows_above_zero])
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("reinplace", [False, True])
def test_halves_equal_the_joint_graph(model: Callable[[], Captured], seed: int | None, reinplace: bool) -> None:
    captured, joint = model(), joint_of(model(), reinplace=reinplace)
    assert bool(joint.reuses) == reinplace
    graph = priced(joint)
    plain = Schedule.save_all(graph.problem)
    schedule = plain if seed is None else random_schedule(random.Random(seed), graph.problem)
    halves = partition(joint, region_schedule(graph, schedule))
    for ours, theirs in zip(run_halves(captured, *halves), run(captured, joint.module), strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


def live_bytes(graph: fx.Graph, boundary: int, reuses: tuple[tuple[str, str], ...]) -> list[int]:
    """Bytes that are live at each evaluation of a scheduled graph, from its last reads; the tangents from `boundary`
    on."""
    found = find_storages(graph, reuses=reuses)
    evaluations = [node for node in graph.nodes if is_scheduled(node)]
    results = set(graph.output_node().all_input_nodes)
    returned = {index for node in results for index in found.of[node]}
    live = [0] * len(evaluations)
    for index, block in enumerate(found.blocks):
        if block.maker.op == "placeholder" and not is_tangent(block.maker):
            continue
        made = boundary if is_tangent(block.maker) else evaluations.index(block.maker)
        reads = [place for place, node in enumerate(evaluations) if index in found.read_by(node)]
        kept = index in returned or is_tangent(block.maker)
        last = len(evaluations) - 1 if kept else max(reads, default=made)
        for place in range(made, last + 1):
            live[place] += found.bytes[index]
    return live


def without_repeated_results(problem: RematProblem, schedule: Schedule) -> Schedule:
    """The schedule without repeated evaluations of the forward's results: the simulator keeps the first of them and the
    graph returns the second."""
    results = {problem.producer[index] for index, storage in enumerate(problem.storages) if storage.kept}
    evaluations = schedule.evaluations
    again = (op in evaluations[:place] for place, op in enumerate(evaluations))
    return Schedule(tuple(op for op, late in zip(evaluations, again, strict=True) if not (late and op in results)))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("reinplace", [False, True])
def test_the_graph_holds_what_the_simulator_says(seed: int | None, reinplace: bool) -> None:
    joint = joint_of(resnet(), reinplace=reinplace)
    graph = priced(joint)
    schedule = Schedule.save_all(graph.problem)
    if seed is not None:
        schedule = without_repeated_results(graph.problem, random_schedule(random.Random(seed), graph.problem))
    region = region_schedule(graph, schedule)
    simulated = simulate(graph.problem, schedule).live_bytes
    named = [int(live) for live, op in zip(simulated, schedule.evaluations, strict=True) if graph.nodes[op]]
    assert live_bytes(scheduled_graph(joint, region).graph, region.boundary, joint.reuses) == named


def layer() -> JointGraph:
    """sin(x @ weight), transposed and summed, with the gradient of the weight."""
    sketch = Sketch()
    weight, x, tangent = sketch.input("primals_1", 3, 4), sketch.input("primals_2", 2, 3), sketch.input("tangents_1")
    mm = sketch.call(aten.mm.default, x, weight)
    sin = sketch.call(aten.sin.default, mm)
    loss = sketch.call(aten.sum.default, sketch.call(aten.t.default, sin))
    gradient = sketch.call(aten.mul.Tensor, sketch.call(aten.cos.default, mm), tangent)
    weights = sketch.call(aten.mm.default, sketch.call(aten.t.default, gradient), x)
    module = sketch.returns(loss, sketch.call(aten.t.default, weights), None)
    return JointGraph(module, 1, frozenset({0}))


def test_golden() -> None:
    forward, backward = partition(layer(), RegionSchedule("", ("mm", "sin", "sum_1", "mm", "cos", "mul", "mm_1"), 3))
    assert_expected_inline(
        f"{format_graph(forward)}\n\n{format_graph(backward)}",
        """\
input primals_1: f32[3, 4]
input primals_2: f32[2, 3]
mm: f32[2, 4] = aten.mm(primals_2, primals_1)
sin: f32[2, 4] = aten.sin(mm)
t: f32[4, 2] = aten.t(sin)
sum_1: f32[] = aten.sum(t)
return (sum_1, primals_1, primals_2)

input primals_1: f32[3, 4]
input primals_2: f32[2, 3]
input tangents_1: f32[]
mm_again: f32[2, 4] = aten.mm(primals_2, primals_1)
cos: f32[2, 4] = aten.cos(mm_again)
mul: f32[2, 4] = aten.mul.Tensor(cos, tangents_1)
t_1: f32[4, 2] = aten.t(mul)
mm_1: f32[4, 3] = aten.mm(t_1, primals_2)
t_2: f32[3, 4] = aten.t(mm_1)
return (t_2, None)""",
    )


def test_values_are_saved_once_where_nothing_is_recomputed() -> None:
    forward, backward = partition(layer(), RegionSchedule("", ("mm", "sin", "sum_1", "cos", "mul", "mm_1"), 3))
    assert format_graph(forward).splitlines()[-1] == "return (sum_1, primals_2, mm)"
    assert [node.name for node in backward.graph.find_nodes(op="placeholder")] == ["primals_2", "mm", "tangents_1"]


def test_a_gradient_that_the_forward_makes_is_handed_over() -> None:
    sketch = Sketch()
    weight = sketch.input("primals_1", 3)
    sketch.input("tangents_1")
    sin, cos = sketch.call(aten.sin.default, weight), sketch.call(aten.cos.default, weight)
    joint = JointGraph(sketch.returns(sketch.call(aten.sum.default, sin), cos), 1)
    forward, backward = partition(joint, RegionSchedule("", ("sin", "cos", "sum_1"), 3))
    assert format_graph(forward).splitlines()[-1] == "return (sum_1, cos)"
    assert format_graph(backward).splitlines() == ["input cos: f32[3]", "input tangents_1: f32[]", "return (cos,)"]


def test_gradients_are_accumulated_in_the_backward() -> None:
    schedule = RegionSchedule("", ("mm", "sin", "sum_1", "cos", "mul", "mm_1"), 3)
    _, backward = partition(layer(), schedule, Accumulation())
    assert_expected_inline(
        "\n".join(format_graph(backward).splitlines()[-4:]),
        """\
mm_1: f32[4, 3] = aten.mm(t_1, primals_2)
t_2: f32[3, 4] = aten.t(mm_1)
accumulate_gradient_0: f32[3, 4] = call_module.accumulate_gradient_0(t_2)
return (accumulate_gradient_0, None)""",
    )

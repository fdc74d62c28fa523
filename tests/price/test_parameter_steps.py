"""Steps within the backward as the problem has them: behind what reads the parameter, with what they take."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from memopt.capture.joint import JointGraph
from memopt.device.storages import find_storages
from memopt.price.price import price
from memopt.price.priced_graph import GraphUse, MemoryUses, NodePrice, PricedGraph
from memopt.solver import Schedule, simulate
from tests.passes.capture import Sketch, aten
from tests.planned import region

WEIGHT = 16 * 16 * 4


def priced(joint: JointGraph, *numbers: int, workspace: int = 100) -> PricedGraph:
    """`numbers` may be stepped in the backward; all parameters are stepped then or at its end."""
    inside = {at: number for at, number in joint.parameter_gradients.items() if number in numbers}
    workspaces = dict.fromkeys(joint.parameter_inputs, workspace)
    use = GraphUse(stepped=inside, step_workspaces=workspaces) if numbers else GraphUse()
    return price(joint.module, joint.forward_outputs, lambda _: NodePrice(1.0, 0), use)


def test_each_step_is_behind_the_last_op_that_reads_the_weight() -> None:
    """The second weight is last read for its layer's input gradient; the first is stepped after its own gradient."""
    found = priced(region(2), 0, 1)
    names = [op.name for op in found.problem.ops]
    assert names[names.index("tangents_1") + 1 :] == [
        "gelu_backward",
        "mm_2",
        "mm_3",
        "step_of_input_1",
        "gelu_backward_1",
        "mm_4",
        "step_of_input_0",
        "hand_over_gradients",
    ]
    steps = {names[op]: {names[reader] for reader in readers} for op, readers in found.waits.items()}
    assert steps == {"step_of_input_1": {"mm_1", "mm_2", "mm_3"}, "step_of_input_0": {"mm", "mm_4"}}


def test_what_is_stepped_is_not_kept() -> None:
    found = priced(region(2), 0, 1)
    assert [storage.name for storage in found.problem.storages if storage.kept] == ["sum_1", "tangents_1"]
    op = next(op for op in found.problem.ops if op.name == "step_of_input_1")
    assert [found.problem.storages[storage].name for storage in op.reads] == ["mm_2"]
    assert op.workspace_bytes == 100


def test_what_is_not_waits_for_the_end() -> None:
    """And is stepped there, one after the other."""
    found = priced(region(2), 1)
    assert "mm_4" in {storage.name for storage in found.problem.storages if storage.kept}
    assert found.problem.ops[-1].workspace_bytes == 100
    assert priced(region(2)).problem.ops[-1].workspace_bytes == 0


def test_the_peak_falls() -> None:
    """At the end of many layers, nothing but one gradient is there instead of all."""

    def peak(*numbers: int) -> int:
        problem = priced(region(8), *numbers, workspace=0).problem
        return int(simulate(problem, Schedule.save_all(problem)).live_bytes[-1])

    assert peak() - peak(*range(8)) == 8 * WEIGHT
    assert peak() - peak(3) == WEIGHT


def test_a_gradient_in_another_order_is_copied() -> None:
    sketch = Sketch()
    weight, x, tangent = (sketch.input(name, 16, 16) for name in ("primals_1", "primals_2", "tangents_1"))
    gradient = sketch.call(aten.t.default, sketch.call(aten.mm.default, x, tangent))
    module = sketch.returns(sketch.call(aten.mm.default, x, weight), gradient, None)
    found = priced(JointGraph.of(module, 1, frozenset({0})), 0)
    (op,) = found.steps
    assert found.problem.ops[op].workspace_bytes == 100 + WEIGHT


def uses(module: fx.GraphModule) -> MemoryUses:
    return MemoryUses(module.graph, find_storages(module.graph))


def test_gradients_that_are_one_memory_wait() -> None:
    """Two halves of one gradient, and a gradient that is what came in."""
    sketch = Sketch()
    first, second, x = (sketch.input(f"primals_{number}", 2, 4) for number in (1, 2, 3))
    tangent = sketch.input("tangents_1", 4, 4)
    output = sketch.call(
        aten.mm.default, sketch.call(aten.cat.default, [first, second]), sketch.call(aten.t.default, x)
    )
    both = sketch.call(aten.mul.Tensor, tangent, tangent)
    halves = [sketch.call(aten.slice.Tensor, both, 0, start, start + 2) for start in (0, 2)]
    alone = sketch.call(aten.slice.Tensor, tangent, 0, 0, 2)
    found = uses(sketch.returns(output, *halves, alone))
    assert [found.before_step(position, position - 1) for position in (1, 2, 3)] == [None, None, None]


def test_a_result_that_reads_the_parameter() -> None:
    joint = region(1)
    found = uses(joint.module)
    assert [node.name for node in found.before_step(1, 0) or ()] == ["mm_1", "mm"]
    assert replace(joint).parameter_gradients == {1: 0}

"""Parameters are stepped after the last evaluation that reads them, through whatever alias it reads them."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

from memopt.capture.joint import JointGraph
from memopt.emit.emit import check_own_memory, partition, sharing_memory
from memopt.emit.gradients import AccumulateGradient, Accumulation
from memopt.planning.schedule_parts import RegionSchedule
from passes import format_graph
from tests.passes.capture import Sketch, aten
from tests.planned import reading_late, region


def program_order(joint: JointGraph) -> tuple[str, ...]:
    unscheduled = (aten.t.default, aten.expand.default, aten.view.default)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    return tuple(node.name for node in calls if node.target not in unscheduled)


def backward_of(joint: JointGraph, *steps: int, evaluations: tuple[str, ...] = (), boundary: int = 0) -> fx.GraphModule:
    order = evaluations or program_order(joint)
    boundary = boundary or order.index("sum_1") + 1
    schedule = RegionSchedule(joint.fingerprint, order, boundary, steps=steps)
    backward = partition(joint, schedule, Accumulation())[1]
    backward.graph.lint()
    return backward


def test_golden() -> None:
    """Each weight is read for the gradient of its input after its own gradient is computed."""
    backward = backward_of(region(2), 0, 1)
    assert_expected_inline(
        format_graph(backward),
        """\
input primals_2: f32[16, 16]
input primals_3: f32[64, 16]
input mm: f32[64, 16]
input gelu: f32[64, 16]
input mm_1: f32[64, 16]
input tangents_1: f32[]
expand: f32[64, 16] = aten.expand(tangents_1, [64, 16])
gelu_backward: f32[64, 16] = aten.gelu_backward(expand, mm_1)
t: f32[16, 64] = aten.t(gelu)
mm_2: f32[16, 16] = aten.mm(t, gelu_backward)
t_1: f32[16, 16] = aten.t(primals_2)
mm_3: f32[64, 16] = aten.mm(gelu_backward, t_1)
step_1: f32[16, 16] = call_module.step_1(mm_2)
gelu_backward_1: f32[64, 16] = aten.gelu_backward(mm_3, mm)
t_2: f32[16, 64] = aten.t(primals_3)
mm_4: f32[16, 16] = aten.mm(t_2, gelu_backward_1)
step_0: f32[16, 16] = call_module.step_0(mm_4)
return (step_0, step_1, None)""",
    )


def test_only_the_named_inputs_are_stepped() -> None:
    modules = dict(backward_of(region(2), 1).named_children())
    assert all(isinstance(module, AccumulateGradient) for module in modules.values())
    assert {name: module.steps for name, module in modules.items()} == {"step_1": True, "accumulate_gradient_0": False}


def names_in_order(backward: fx.GraphModule) -> list[str]:
    return [node.name for node in backward.graph.nodes]


def test_a_step_comes_after_recomputed_operators() -> None:
    """A recomputed operator that runs late reads the weight once more, so the step comes after it."""
    joint = reading_late()
    order = program_order(joint)
    again = (*order[:-1], "mm", "gelu", order[-1])
    assert names_in_order(backward_of(joint, 0, 1, evaluations=again))[-5:-1] == [
        "mm_again",
        "step_0",
        "gelu_again",
        "mul",
    ]
    backward = backward_of(joint, 0, 1)
    assert names_in_order(backward)[-3:-1] == ["step_0", "mul"]


def sharing(*, returned: bool) -> JointGraph:
    """x * w, which reads the weight through an alias that the forward makes; with `returned`, the alias is an output
    too."""
    sketch = Sketch()
    weight, x, tangent = (sketch.input(name, 4, 4) for name in ("primals_1", "primals_2", "tangents_1"))
    alias = sketch.call(aten.t.default, weight)
    product = sketch.call(aten.mul.Tensor, x, alias)
    gradient = sketch.call(aten.t.default, sketch.call(aten.mul.Tensor, tangent, x))
    gradient_of_x = sketch.call(aten.mul.Tensor, tangent, alias)
    if returned:
        module = sketch.returns(product, alias, gradient, gradient_of_x)
        return JointGraph.of(module, 2, frozenset({0}))
    return JointGraph.of(sketch.returns(product, gradient, gradient_of_x), 1, frozenset({0}))


def test_a_step_comes_after_operators_that_read_an_alias() -> None:
    backward = backward_of(sharing(returned=False), 0, boundary=1)
    found = names_in_order(backward)
    assert found.index("step_0") > found.index("mul_2") > found.index("mul_1")


def test_a_parameter_with_a_returned_alias_cannot_be_stepped() -> None:
    with pytest.raises(AssertionError, match="planned in the backward but must come after it"):
        backward_of(sharing(returned=True), 0, boundary=1)
    backward = backward_of(sharing(returned=True), boundary=1)
    assert [type(module) for module in backward.children()] == [AccumulateGradient]


def test_a_stepped_parameter_shares_no_memory() -> None:
    weight, other = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    check_own_memory((weight, 1, other), (0, 2))
    alias = weight.detach()[0]
    check_own_memory((weight, alias, other), (2,))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) shares its memory .* leave optimizer_in_backward out"):
        check_own_memory((weight, alias, other), (0, 2))


def test_parameters_that_share_memory() -> None:
    model = nn.Linear(4, 4)
    assert sharing_memory(model) == []
    model.register_buffer("view", model.weight.detach()[0])
    assert [parameter is model.weight for parameter in sharing_memory(model)] == [True]

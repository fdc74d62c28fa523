"""Gradients are added to `.grad` inside the backward only where autograd would do nothing else with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx

from memopt.emit.gradients import AccumulateGradient, Accumulation, accumulate_in_place, is_hooked
from memopt.optimizers import OptimizerInBackward
from passes import format_graph
from tests.passes.capture import Sketch, aten


class Twice(torch.autograd.Function):
    """A stand-in for a captured region: doubles its last input, and passes its gradient to `accumulate`."""

    given: list[Tensor | None]

    @staticmethod
    def forward(ctx: Any, accumulate: AccumulateGradient, other: Tensor, value: Tensor) -> Tensor:
        ctx.accumulate = accumulate
        return 2 * value.detach() + other.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Twice.given.append(ctx.accumulate(2 * gradient))
        return None, gradient, Twice.given[-1]


@pytest.fixture(autouse=True)
def no_gradients_yet() -> None:
    Twice.given = []


def loss(parameter: Tensor, other: Tensor | None = None, *, allowed: bool = True) -> Tensor:
    accumulate = AccumulateGradient(Accumulation(allowed), position=1)
    result: Any = Twice.apply(accumulate, torch.zeros(3) if other is None else other, parameter)
    return result.sum()


def trained() -> torch.nn.Parameter:
    """A parameter that holds a gradient of ones."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    return parameter


def test_the_first_gradient_is_passed_on() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    loss(parameter).backward()
    assert Twice.given[0] is not None
    assert torch.equal(parameter.grad, torch.full((3,), 2.0))


def test_later_gradients_are_added_in_place() -> None:
    parameter = trained()
    held = parameter.grad
    loss(parameter).backward()
    assert Twice.given == [None]
    assert parameter.grad is held
    assert torch.equal(held, torch.full((3,), 3.0))


def test_gradients_go_to_the_parameter_of_their_own_call() -> None:
    """One region serves many calls, whose backwards may run in any order."""
    first, second = trained(), trained()
    losses = [loss(first), loss(second)]
    losses[0].backward()
    assert (first.grad.tolist(), second.grad.tolist()) == ([3.0] * 3, [1.0] * 3)
    losses[1].backward()
    assert second.grad.tolist() == [3.0] * 3


def test_torch_autograd_grad_gets_its_gradient() -> None:
    parameter = trained()
    (gradient,) = torch.autograd.grad(loss(parameter), parameter)
    assert gradient.tolist() == [2.0] * 3
    assert parameter.grad.tolist() == [1.0] * 3


def test_a_gradient_that_autograd_drops_is_not_added() -> None:
    parameter, other = trained(), torch.nn.Parameter(torch.zeros(3))
    loss(parameter, other).backward(inputs=[other])
    assert Twice.given == [None]
    assert parameter.grad.tolist() == [1.0] * 3
    assert other.grad.tolist() == [1.0] * 3


def test_each_backward_through_one_graph_asks_autograd_anew() -> None:
    parameter, other = trained(), torch.nn.Parameter(torch.zeros(3))
    total = loss(parameter, other)
    total.backward(inputs=[other], retain_graph=True)
    assert parameter.grad.tolist() == [1.0] * 3
    total.backward(retain_graph=True)
    assert parameter.grad.tolist() == [3.0] * 3
    parameter.grad = None
    total.backward(retain_graph=True)
    assert Twice.given[-1] is not None
    assert parameter.grad.tolist() == [2.0] * 3
    (gradient,) = torch.autograd.grad(total, parameter)
    assert gradient.tolist() == [2.0] * 3


def with_hook(parameter: Tensor) -> None:
    parameter.register_hook(lambda gradient: 10 * gradient)


def with_late_hook(parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(multiply_gradient)


def multiply_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(10)


@pytest.mark.parametrize(("hook", "expected"), [(with_hook, 21.0), (with_late_hook, 30.0)])
def test_hooks_see_their_gradient(hook: Callable[[Tensor], None], expected: float) -> None:
    parameter = trained()
    assert not is_hooked(parameter)
    hook(parameter)
    assert is_hooked(parameter)
    loss(parameter).backward()
    assert Twice.given[0] is not None
    assert parameter.grad.tolist() == [expected] * 3


def differentiable(parameter: Tensor) -> None:
    parameter.grad = torch.ones(3, requires_grad=True)


def sparse(parameter: Tensor) -> None:
    parameter.grad = torch.ones(3).to_sparse()


@pytest.mark.parametrize("hold", [differentiable, sparse])
def test_gradients_that_autograd_would_not_add_in_place_are_passed_on(hold: Callable[[Tensor], None]) -> None:
    parameter = trained()
    hold(parameter)
    loss(parameter).backward()
    assert Twice.given[0] is not None
    assert parameter.grad.to_dense().tolist() == [3.0] * 3


def test_nothing_is_added_in_place_while_several_forwards_wait() -> None:
    parameter = trained()
    loss(parameter, allowed=False).backward()
    assert Twice.given[0] is not None
    assert parameter.grad.tolist() == [3.0] * 3


def test_an_input_that_is_no_leaf_gets_its_gradient() -> None:
    parameter = trained()
    loss(parameter * 5).backward()
    assert Twice.given[0] is not None
    assert parameter.grad.tolist() == [11.0] * 3


def stepped(parameter: Tensor, *, allowed: bool = True, other: Tensor | None = None) -> Tensor:
    step = AccumulateGradient(Accumulation(allowed), position=1, steps=True)
    result: Any = Twice.apply(step, torch.zeros(3) if other is None else other, parameter)
    return result.sum()


def in_backward(*parameters: torch.nn.Parameter) -> OptimizerInBackward:
    return OptimizerInBackward(torch.optim.SGD(parameters, lr=1.0))


def test_a_parameter_is_stepped_and_nothing_passed_on() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = in_backward(parameter)
    for steps in (1, 2):
        stepped(parameter).backward()
        optimizer.step()
        assert parameter.tolist() == [-2.0 * steps] * 3
        assert parameter.grad is None
    assert Twice.given == [None, None]


def test_the_hook_that_steps_does_not_prevent_the_step() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    in_backward(parameter)
    assert is_hooked(parameter)
    assert not is_hooked(parameter, stepped=True)
    in_backward(parameter)
    assert is_hooked(parameter, stepped=True)


def held(parameter: Tensor) -> None:
    parameter.grad = torch.zeros(3)


def negated(parameter: Tensor) -> None:
    parameter.register_hook(lambda gradient: gradient.neg().neg())


def late(parameter: Tensor) -> None:
    parameter.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("prepare", [held, negated, late])
def test_autograd_steps_where_a_gradient_or_another_hook_is_there(prepare: Callable[[Tensor], None]) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    in_backward(parameter)
    prepare(parameter)
    stepped(parameter).backward()
    assert Twice.given[0] is not None
    assert parameter.tolist() == [-2.0] * 3


def test_autograd_steps_while_several_forwards_wait() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    in_backward(parameter)
    (stepped(parameter, allowed=False) + stepped(parameter, allowed=False)).backward()
    assert None not in Twice.given
    assert parameter.tolist() == [-4.0] * 3


def test_requested_and_dropped_gradients_step_nothing() -> None:
    parameter, other = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    in_backward(parameter)
    (gradient,) = torch.autograd.grad(stepped(parameter), parameter)
    assert gradient.tolist() == [2.0] * 3
    stepped(parameter, other=other).backward(inputs=[other])
    assert Twice.given[1] is None
    assert parameter.tolist() == [0.0] * 3


def test_without_an_optimizer_the_gradient_is_accumulated() -> None:
    parameter = trained()
    stepped(parameter).backward()
    assert Twice.given == [None]
    assert parameter.grad.tolist() == [3.0] * 3
    assert parameter.tolist() == [0.0] * 3


def backward_graph() -> fx.GraphModule:
    sketch = Sketch()
    x, tangent = sketch.input("mm", 2, 3), sketch.input("tangents_1", 2, 4)
    product = sketch.call(aten.mm.default, sketch.call(aten.t.default, tangent), x)
    summed = sketch.call(aten.sum.dim_IntList, tangent, [0], True)
    view = sketch.call(aten.view.default, summed, [4])
    weight = sketch.call(aten.t.default, sketch.call(aten.t.default, product))
    return sketch.returns(weight, None, view, tangent)


def test_golden() -> None:
    """Each gradient is accumulated right after its storage is made: the views that lead to it move up."""
    backward = backward_graph()
    accumulate_in_place(backward, {0: 0, 2: 5}, Accumulation())
    backward.graph.lint()
    assert_expected_inline(
        format_graph(backward),
        """\
input mm: f32[2, 3]
input tangents_1: f32[2, 4]
t: f32[4, 2] = aten.t(tangents_1)
mm_1: f32[4, 3] = aten.mm(t, mm)
t_1: f32[3, 4] = aten.t(mm_1)
t_2: f32[4, 3] = aten.t(t_1)
accumulate_gradient_0: f32[4, 3] = call_module.accumulate_gradient_0(t_2)
sum_1: f32[1, 4] = aten.sum.dim_IntList(tangents_1, [0], True)
view: f32[4] = aten.view(sum_1, [4])
accumulate_gradient_5: f32[4] = call_module.accumulate_gradient_5(view)
return (accumulate_gradient_0, None, accumulate_gradient_5, tangents_1)""",
    )


def test_nothing_to_accumulate_changes_nothing() -> None:
    backward = backward_graph()
    before = format_graph(backward)
    accumulate_in_place(backward, {}, Accumulation())
    assert format_graph(backward) == before

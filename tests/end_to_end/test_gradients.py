"""All ways to ask for gradients and to observe them: autograd.grad, some inputs, frozen parameters, hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.end_to_end import odd_models
from tests.end_to_end.pieces import assert_same, call, check, loss, plan, run, step
from tests.end_to_end.usual import Blocks, batch, make, refusal, steps, usual

pytestmark = pytest.mark.plans_always  # the plain steps would fit


def test_autograd_grad_of_all_and_of_some_parameters() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        some = [model.get_parameter("head.weight"), model.get_parameter("blocks.1.1.bias")]
        first = torch.autograd.grad(loss(model, inputs), list(model.parameters()))
        del first
        return [*torch.autograd.grad(loss(model, inputs), some)]

    check(model, piece, usual().tight, inputs)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autograd_grad_beside_held_gradients() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> Any:
        step(model, inputs)
        return torch.autograd.grad(loss(model, inputs), list(model.parameters()))

    error = refusal(model, piece, usual().tight, inputs)
    model.zero_grad()
    check(memopt.remove(model), piece, error.smallest_gb, inputs)


def test_backward_into_some_inputs() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        some = [model.get_parameter("head.weight"), model.get_parameter("blocks.1.1.bias")]
        loss(model, inputs).backward(inputs=some)  # type: ignore[no-untyped-call]
        step(model, inputs)
        loss(model, inputs).backward(inputs=some)  # type: ignore[no-untyped-call]

    check(model, piece, usual().tight, inputs)


def test_a_gradient_into_the_inputs() -> None:
    model, inputs = make(), batch()
    inputs[0].requires_grad_()

    def piece(model: nn.Module) -> Tensor | None:
        inputs[0].grad = None
        step(model, inputs)
        return inputs[0].grad

    check(model, piece, usual().tight, inputs)


def test_frozen_parameters_and_thawed_ones() -> None:
    model, inputs = make(odd_models.LowRank), batch()

    def piece(model: nn.Module) -> None:
        steps(model, inputs, inputs)
        model.get_submodule("blocks.0").requires_grad_(True)
        step(model, inputs)

    check(model, piece, plan(copy.deepcopy(model).requires_grad_(True), inputs).plain_peak_gb, inputs)
    assert model.get_parameter("blocks.1.1.weight").grad is None


def scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 1.5 * output


def scale_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 0.5, *args[1:])


def scale_gradient(module: nn.Module, to_inputs: Any, to_outputs: Any) -> Any:
    return tuple(None if gradient is None else 0.5 * gradient for gradient in to_inputs)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda model: model.get_submodule("blocks.1").register_forward_hook(scale_output),
    "forward of the model": lambda model: model.register_forward_hook(scale_output),
    "forward pre": lambda model: model.get_submodule("blocks.1").register_forward_pre_hook(scale_input),
}


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["before", "after a step"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_hooks_on_modules(hook: Callable[[nn.Module], Any], early: bool) -> None:
    model, inputs = make(), batch()
    budget = usual().tight + 0.3 / 1024

    def piece(model: nn.Module) -> list[Tensor]:
        if early:
            return [step(model, inputs)]
        first = step(model, inputs)
        model.zero_grad()
        handle = hook(model)
        second = step(model, inputs)
        handle.remove()
        model.zero_grad()
        return [first, second, step(model, inputs)]

    if early:
        hook(model)
    check(model, piece, budget, inputs)


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["before", "after a step"])
def test_a_full_backward_hook_breaks_the_graph(early: bool) -> None:
    """Dynamo does not capture modules with such hooks: they run eagerly, and count as code between the regions."""
    model, inputs = make(Blocks), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        if early:
            return [step(model, inputs)]
        first = step(model, inputs)
        model.zero_grad()
        model.get_submodule("blocks.1").register_full_backward_hook(scale_gradient)
        return [first, step(model, inputs)]

    if early:
        model.get_submodule("blocks.1").register_full_backward_hook(scale_gradient)
    check(model, piece, 1.2 * usual(Blocks).plan.plain_peak_gb, inputs)
    assert len(memopt.plan_of(model).regions) > 1


@pytest.mark.parametrize("early", [True, False], ids=["before optimize", "after a step"])
def test_hooks_on_parameters(early: bool) -> None:
    """A hook sees, and may change, the gradient of one backward, not the accumulated sum."""
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        if not early:
            step(model, inputs)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        steps(model, inputs, inputs)

    check(model, piece, usual().tight + 2.5 * usual().gradients, inputs)


class Reading(Blocks):
    """Scales its activations by a parameter without gradients, and returns another as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((odd_models.WIDTH,), 0.9))
        self.bias = nn.Parameter(torch.ones(odd_models.WIDTH))

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale, bias = self.scale + 0.1, 2 * self.bias
        return super().body(x * scale + bias)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x, labels), self.bias.view(8, -1)


def test_parameters_that_are_read_without_gradients_alone() -> None:
    """Autograd does not visit them, so that their hooks are not called. One that is returned has a gradient."""
    model, inputs = make(Reading), batch()

    def piece(model: nn.Module) -> list[str]:
        called: list[str] = []
        scale = model.get_parameter("scale")
        scale.register_hook(lambda gradient: called.append("before"))  # type: ignore[no-untyped-call]
        scale.register_post_accumulate_grad_hook(lambda parameter: called.append("after"))
        step(model, inputs)
        value, bias = call(model, inputs)
        (value + bias.square().sum()).backward()
        return called

    check(model, piece, 1.1 * usual(Blocks).plan.plain_peak_gb, inputs, outputs="all")


def test_a_hook_that_comes_late_is_refused_where_its_gradients_do_not_fit() -> None:
    model, inputs = make(), batch()
    budget = usual().smallest + 0.55 / 1024

    def piece(model: nn.Module) -> None:
        step(model, inputs)
        value = loss(model, inputs)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    refusal(model, piece, budget, inputs)


def test_a_hook_that_comes_late_sees_the_gradient_of_its_backward() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> None:
        step(model, inputs)
        value = loss(model, inputs)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))  # type: ignore[no-untyped-call]
        value.backward()  # type: ignore[no-untyped-call]

    check(model, piece, 1.0, inputs)


def test_an_optimiser_in_the_backward() -> None:
    model, inputs = make(), batch()

    def piece(model: nn.Module) -> list[Tensor]:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        return [*steps(model, inputs, inputs), *(parameter.detach().clone() for parameter in model.parameters())]

    plain = run(copy.deepcopy(model), piece, inputs)
    memopt.optimize(model, usual().tight, optimizer=None, precision="fp32", allow={"recompute"})
    assert_same(run(model, piece, inputs), plain)
